"""The kernels compiled for a CPU that has fewer instructions than this one."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from trencadis_torch.linear.native import SOURCE, Native
from trencadis_torch.native_build import find_compiler

__all__ = ["MASKS", "masked"]

MASKS = {
    "x86-64": "",
    "x86-64-v2": "ssse3",
    "x86-64-v3": "avx2",
    "skylake-avx512": "avx512bw",
    "alderlake": "avx_vnni",
    "cascadelake": "avx512_vnni",
    "cooperlake": "avx512_bf16",
    "native": "",
}
"""What is compiled for, and the flag of a CPU that can run it."""

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fopenmp",
)


@cache
def masked(name: str) -> Native | None:
    """Return the library compiled for a mask; None: this CPU or this compiler has not what it takes."""
    compiler, needed = find_compiler(), MASKS[name]
    if compiler is None or (needed and needed not in _flags_of_this_cpu()):
        return None
    with tempfile.TemporaryDirectory() as room:
        file = Path(room) / "linear.so"
        command = [compiler, *_FLAGS, f"-march={name}", str(SOURCE), "-o", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            return None
        return Native(ctypes.CDLL(str(file)))


def _flags_of_this_cpu() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()
