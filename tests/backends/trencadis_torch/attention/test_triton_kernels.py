from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "support/backends/compiled_for_gpu.py"


@pytest.mark.parametrize(("capability", "kind"), [("80", "int8"), ("90", "half")])
def test_kernels_compile_for_gpus_that_are_not_here_in_few_variants(tmp_path, capability, kind):
    """To machine code, by Triton and the assembler that it brings. What batches look like makes no variant: none is compiled late."""
    pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be compiled")
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), capability, kind]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert result.returncode == 0, result.stderr[-2000:]
    name, attends, merges, shared = result.stdout.split()
    assert name == kind
    # One query, up to 16 and more; the first two with keys shared out and without.
    assert 3 <= int(attends) <= 5
    assert 1 <= int(merges) <= 2
    # What the smallest of current GPUs, of capability 8.6 and 8.9, let a program have.
    assert 0 < int(shared) <= 99 * 1024


@pytest.mark.slow
def test_module_can_be_imported_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from trencadis_torch.attention import triton as triton_attention, triton_kernels\n"
        "print(triton_kernels.is_installed(), triton_kernels.is_interpreted())\n"
        "print(triton_attention.obstacle((), torch.device('cuda')))\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "False False",
        "the package triton is missing, which a CUDA build of PyTorch brings",
    ]
