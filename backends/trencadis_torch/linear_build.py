"""Compiles ``linear.cpp`` for the machine at hand, once: the library is kept under the user's cache directory.

Its name is a digest of the source, the compiler, the flags and the processor's features, so nothing stale is ever loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["SOURCE", "build"]

logger = logging.getLogger("trencadis.torch")

SOURCE: Final = Path(__file__).with_name("linear.cpp")
COMPILERS: Final = ("g++", "clang++", "c++")
FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
"""Nothing that lets a compiler reorder sums: rows must not depend on the rows beside them."""

TIMEOUT_S: Final = 120.0


def build(source: Path = SOURCE, *, compiler: str | None = None, directory: Path | None = None) -> Path | None:
    """Return the compiled library, compiling it if need be; None, with a line in the log, where that is not possible.

    Args:
        source: Of the library.
        compiler: Its path; None: the first of ``COMPILERS`` there is.
        directory: Where libraries are kept; None: ``~/.cache/trencadis/native``.
    """
    found = compiler or next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        logger.info("No C++ compiler (%s): linear layers run in PyTorch's own kernels.", ", ".join(COMPILERS))
        return None
    try:
        home = directory or Path.home() / ".cache" / "trencadis" / "native"
        target = home / f"{source.stem}-{_digest(source, found)}.so"
        if not target.exists():
            home.mkdir(parents=True, exist_ok=True)
            _compile(source, found, target)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("%s cannot be compiled: %s. Linear layers run in PyTorch's own kernels.", source.name, error)
        return None
    return target


def _digest(source: Path, compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=TIMEOUT_S, check=True).stdout
    for part in (source.read_bytes(), " ".join(FLAGS).encode(), version, _features()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _features() -> bytes:
    """Return what the processor says of itself: a home directory may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return b""
    lines = info.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})).encode()


def _compile(source: Path, compiler: str, target: Path) -> None:
    """Compile into a file of another name first: another process may be doing the same."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, str(source), "-o", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {(done.stderr.strip() or 'no message').splitlines()[0]}")
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
