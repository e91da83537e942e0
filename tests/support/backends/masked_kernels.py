"""The kernels compiled for a CPU that has fewer instructions than this one, or a tile unit that is emulated."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from trencadis_torch.linear.native import SOURCE, Native
from trencadis_torch.native_build import find_compiler, why_no_tiles

MASKS = {
    "x86-64": "",
    "x86-64-v2": "ssse3",
    "x86-64-v3": "avx2",
    "skylake-avx512": "avx512bw",
    "alderlake": "avx_vnni",
    "cascadelake": "avx512_vnni",
    "cooperlake": "avx512_bf16",
    "native": "",
    "tiles": "",
}
"""What is compiled for, and the flag of a CPU that can run it."""

TILES = f'-DTRENCADIS_TILE_UNIT="{Path(__file__).with_name("emulated_tiles.h")}"'
"""Option by which products use an emulated tile unit."""

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
    if MASKS[name] and MASKS[name] not in _flags_of_this_cpu():
        return None
    if name == "native" and "amx_tile" in _flags_of_this_cpu() and why_no_tiles():
        return None
    library = compiled(SOURCE, f"-march={name}") if name != "tiles" else compiled(SOURCE, *tile_options())
    return library and Native(library)


def tile_options() -> tuple[str, ...]:
    """Return the options for an emulated tile unit, beside this CPU's vectors for pairs and integers if it has them, else plain C++."""
    return TILES, "-march=cooperlake" if "avx512_bf16" in _flags_of_this_cpu() else "-march=x86-64"


@cache
def compiled(source: Path, *options: str) -> ctypes.CDLL | None:
    """Return a source's library with these options; None: this compiler does not make it."""
    compiler = find_compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as room:
        file = Path(room) / "compiled.so"
        done = subprocess.run(
            [compiler, *_FLAGS, *options, str(source), "-o", str(file)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return None if done.returncode else ctypes.CDLL(str(file))


def _flags_of_this_cpu() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()
