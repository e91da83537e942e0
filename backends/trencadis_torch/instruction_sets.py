"""Instruction sets that kernels are compiled for, which of them a CPU has, and the commands that compile.

    x86_64    sse4 ▶ avx2 ▶ avx2_vnni
                          ▶ avx512 ▶ avx512_vnni ▶ avx512_bf16 ▶ amx
    aarch64   neon ▶ neon_dotprod ▶ neon_bf16

A source is compiled for a set only if it asks for a macro that the set adds; else the library of the set before it serves.
The build of a wheel loads this file alone, without dependencies: it imports Python's own library only.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "AUTO",
    "NAMES",
    "SETS",
    "TILES",
    "InstructionSet",
    "before",
    "chosen_set",
    "compile_command",
    "cpu_flags",
    "find_compiler",
    "library_name",
    "link_command",
    "narrowed",
    "sets_for",
    "texts_of",
    "understands",
]

AUTO: Final = "auto"
TILES: Final = "amx"
"""The set whose tiles a process has to ask its system for."""
COMPILERS: Final = ("g++", "c++", "clang++")
FLAGS: Final = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC"),
    "-fvisibility-inlines-hidden",
)
"""None that lets a compiler reorder sums: rows must not depend on the rows beside them."""

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_KEY_CHARS: Final = 24


class InstructionSet(NamedTuple):
    """What a compiler may use.

    Attributes:
        name: Name in configurations.
        machine: Kind of machine, by ``platform.machine()``.
        before: Name of the set that this one adds to; empty: the first.
        options: For the compiler, beside those of the sets before.
        flags: Flags of ``/proc/cpuinfo`` that a CPU needs for this set, beside those of the sets before.
        macros: Macros that a compiler defines for this set and not for those before; empty: any source is compiled for it.
    """

    name: str
    machine: str
    before: str
    options: tuple[str, ...]
    flags: tuple[str, ...]
    macros: tuple[str, ...] = ()

    @property
    def all_options(self) -> tuple[str, ...]:
        """Those of this set and of those before. Pure."""
        return (*(_BY_NAME[self.before].all_options if self.before else ()), *self.options)

    @property
    def all_flags(self) -> frozenset[str]:
        """Those of this set and of those before. Pure."""
        return frozenset(self.flags) | (_BY_NAME[self.before].all_flags if self.before else frozenset())


# Each instruction is named, for compilers before GCC 11 and clang 12 do not know x86-64-v3.
SETS: Final = (
    InstructionSet(
        name="sse4",
        machine="x86_64",
        before="",
        options=("-mcx16", "-msahf", "-mpopcnt", "-msse4.2"),
        flags=("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"),
    ),
    InstructionSet(
        name="avx2",
        machine="x86_64",
        before="sse4",
        options=("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe"),
        flags=("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"),
    ),
    InstructionSet(
        name="avx2_vnni",
        machine="x86_64",
        before="avx2",
        options=("-mavxvnni",),
        flags=("avx_vnni",),
        macros=("__AVXVNNI__",),
    ),
    InstructionSet(
        name="avx512",
        machine="x86_64",
        before="avx2",
        options=("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"),
        flags=("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    ),
    InstructionSet(
        name="avx512_vnni",
        machine="x86_64",
        before="avx512",
        options=("-mavx512vnni",),
        flags=("avx512_vnni",),
        macros=("__AVX512VNNI__",),
    ),
    InstructionSet(
        name="avx512_bf16",
        machine="x86_64",
        before="avx512_vnni",
        options=("-mavx512bf16",),
        flags=("avx512_bf16",),
        macros=("__AVX512BF16__",),
    ),
    InstructionSet(
        name=TILES,
        machine="x86_64",
        before="avx512_bf16",
        options=("-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        flags=("amx_tile", "amx_int8", "amx_bf16"),
        macros=("__AMX_TILE__", "__AMX_INT8__", "__AMX_BF16__"),
    ),
    InstructionSet(name="neon", machine="aarch64", before="", options=("-march=armv8-a",), flags=("asimd",)),
    InstructionSet(
        name="neon_dotprod",
        machine="aarch64",
        before="neon",
        options=("-march=armv8.2-a+fp16+dotprod",),
        flags=("asimddp", "asimdhp", "fphp"),
        macros=("__ARM_FEATURE_DOTPROD", "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC"),
    ),
    InstructionSet(
        name="neon_bf16",
        machine="aarch64",
        before="neon_dotprod",
        options=("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",),
        flags=("bf16", "i8mm"),
        macros=("__ARM_FEATURE_BF16_VECTOR_ARITHMETIC", "__ARM_FEATURE_MATMUL_INT8"),
    ),
)
"""A later one of the same machine is the better one, where a CPU has both."""

_BY_NAME: Final = {one.name: one for one in SETS}
NAMES: Final = tuple(_BY_NAME)


def cpu_flags() -> frozenset[str]:
    """Return what this machine's CPU has, in the words of ``/proc/cpuinfo``; empty where the system does not say it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def chosen_set(most: str = AUTO, *, flags: frozenset[str] | None = None, machine: str = "") -> InstructionSet | None:
    """Return the best set that a CPU has; None: it has none of them.

    Args:
        most: Name of the best one that may be used; ``auto``: any.
        flags: Flags of the CPU, as in ``/proc/cpuinfo``; None: this machine's.
        machine: Kind of machine; empty: this machine's.

    Raises:
        ValueError: The CPU does not have the set that is named.
    """
    flags, machine = cpu_flags() if flags is None else flags, machine or platform.machine()
    found = [one for one in SETS if one.machine == machine and one.all_flags <= flags]
    if most == AUTO:
        return found[-1] if found else None
    if _BY_NAME[most] not in found:
        has = ", ".join(one.name for one in found) or "none of the sets that kernels are built for"
        raise ValueError(f"this CPU ({machine}) does not have {most}, but {has}.")
    return _BY_NAME[most]


def narrowed(chosen: InstructionSet, texts: Sequence[str]) -> InstructionSet:
    """Return the set that a source's library is compiled for: one before the chosen one, where what it adds is not asked for. Pure.

    Args:
        chosen: The best that the CPU has.
        texts: The source's text and those of its headers.
    """
    while chosen.macros and not any(macro in text for macro in chosen.macros for text in texts):
        chosen = _BY_NAME[chosen.before]
    return chosen


def before(chosen: InstructionSet) -> InstructionSet | None:
    """Return the set that one adds to; None: it is the first. Pure."""
    return _BY_NAME.get(chosen.before)


def sets_for(texts: Sequence[str], machine: str) -> list[InstructionSet]:
    """Return the sets that a source is compiled for, for all CPUs of a kind. Pure."""
    found = (narrowed(one, texts) for one in SETS if one.machine == machine)
    return list(dict.fromkeys(found))


def texts_of(source: Path) -> list[str]:
    """Return a file's text, and those of the headers beside it that it includes, each once."""
    found: dict[Path, str] = {}
    left = [source]
    while left:
        path = left.pop()
        if path not in found:
            found[path] = path.read_text(encoding="utf-8")
            left.extend(path.parent / name for name in _INCLUDE.findall(found[path]))
    return list(found.values())


def library_name(source: Path, chosen: InstructionSet, texts: Sequence[str]) -> str:
    """Return the name of a library that comes with the package: another one for another text or other options. Pure."""
    facts = "\0".join((*texts, *FLAGS, *chosen.all_options))
    return f"{source.stem}-{chosen.name}-{hashlib.sha256(facts.encode()).hexdigest()[:_KEY_CHARS]}.so"


# ---------------------------------------------------------------------------------------------------- the compiler


def find_compiler() -> str | None:
    """Return the C++ compiler: that of ``CXX``, else the first one in ``PATH``."""
    named = os.environ.get("CXX", "").split()
    found = (shutil.which(name) for name in (*named[:1], *COMPILERS))
    return next((path for path in found if path), None)


@functools.cache
def understands(compiler: str, chosen: InstructionSet) -> bool:
    """Return whether a compiler knows the options of a set: old ones do not know new instructions."""
    command = [compiler, *chosen.all_options, "-x", "c++", "-E", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def compile_command(
    compiler: str, source: Path, to: Path, *, options: Sequence[str], defines: Sequence[str] = (), threads: bool = True
) -> list[str]:
    """Return the command that compiles a source. Pure.

    Args:
        compiler: Path of the compiler.
        source: The C++ file.
        to: The object file.
        options: Compiler options of an instruction set.
        defines: For the preprocessor.
        threads: With OpenMP.
    """
    defined = [f"-D{define}" for define in defines]
    openmp = ["-fopenmp"] if threads else []
    return [compiler, *FLAGS, *openmp, *defined, *options, "-c", str(source), "-o", str(to)]


def link_command(compiler: str, compiled: Path, to: Path) -> list[str]:
    """Return the command that links it. Pure.

    OpenMP's functions are left open, without ``-fopenmp``, which would ask for the compiler's own runtime: they are those of the
    runtime that the process has, which :mod:`trencadis_torch.native_build` makes known before it loads a library.
    """
    return [compiler, "-shared", "-Wl,--as-needed", "-s", str(compiled), "-o", str(to)]
