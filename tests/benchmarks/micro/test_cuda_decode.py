from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "micro" / "cuda_decode.py"


@pytest.mark.slow
def test_without_a_device_it_says_so_in_a_line_and_ends_well():
    # Also where there is one: CUDA shows no device then.
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (result.returncode, result.stdout) == (0, "No CUDA device: nothing is measured.\n"), result.stderr
