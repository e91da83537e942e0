"""A server's life for some minutes: bad requests, raw HTTP, cancels, kills and stops at once. Nothing grows, and nothing is left.

``SOAK_MINUTES=30`` makes it half an hour. What is measured in seconds is printed and not judged here:
``python benchmarks/soak/hostile.py --minutes 30 --kill-every 60`` does that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MINUTES = float(os.environ.get("SOAK_MINUTES", "3"))
SEED = 22


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine in Linux's /proc")
def test_a_server_stays_as_it_is_whatever_is_done_to_it_and_its_engine() -> None:
    soak = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak" / "hostile.py"), "--without-times", "--seed", str(SEED),
         "--minutes", str(MINUTES), "--kill-every", str(min(60.0, MINUTES * 60 / 8))],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )  # fmt: skip
    assert soak.returncode == 0, soak.stdout
    assert "every figure is as wanted" in soak.stdout
