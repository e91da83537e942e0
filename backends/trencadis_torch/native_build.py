"""C++ beside this package becomes a library of this machine: compiled when it is first needed, and kept in the user's cache.

    source, compiler, CPU, OpenMP runtime ─▶ key ─▶ cached library, if its digest is right
                                                 └▶ compile ▶ link ▶ put in its place at once ▶ load

Any number of processes may do so at the same time: each builds a file of its own, and the last one in place is as good as the first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from trencadis.errors import BackendError

__all__ = ["INSTALL_HINT", "cache_directory", "find_compiler", "load_library", "openmp_runtime", "writable_directory"]

logger = logging.getLogger("trencadis.torch")

INSTALL_HINT = (
    "Install a C++ compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name one in CXX."
)

_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
"""None that lets a compiler reorder sums: rows must not depend on the rows beside them."""

_NATIVE = "-march=native"
_TIMEOUT_S = 300.0
_DIGEST_BYTES = 32
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*\.so[.\d]*")


def load_library(source: Path, *, directory: Path | None = None) -> ctypes.CDLL:
    """Return the library of a C++ file, compiled if the cache does not have it; a few seconds then, else milliseconds.

    Args:
        source: A file that includes the standard library and headers beside it, by ``#include "name.h"``.
        directory: Of the cache; None is the user's.

    Raises:
        BackendError: There is no compiler, or it fails; the message has its last words.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BackendError(
            f"{source.name}: no C++ compiler in PATH ({', '.join(_COMPILERS)}) and none in CXX.", hint=INSTALL_HINT
        )
    runtime = openmp_runtime()
    file = writable_directory(directory or cache_directory()) / f"{source.stem}-{_key(source, compiler, runtime)}.so"
    library = _load(file)
    if library is None:
        _build(source, file, compiler, runtime)
        library = _load(file)
    if library is None:
        raise BackendError(
            f"{file} was just built and cannot be loaded.", hint='[backend.torch] attention = "sdpa" and pack = "off".'
        )
    return library


def find_compiler() -> str | None:
    """Return the C++ compiler: that of ``CXX``, else the first one in ``PATH``."""
    named = os.environ.get("CXX", "").split()
    found = (shutil.which(name) for name in (*named[:1], *_COMPILERS))
    return next((path for path in found if path), None)


def cache_directory(kind: str = "native") -> Path:
    """Return where what was compiled is kept: ``$XDG_CACHE_HOME/trencadis/<kind>``, by default under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "trencadis" / kind


def openmp_runtime() -> str:
    """Return the OpenMP runtime that this process has loaded, torch's own if there are several; empty: none.

    A library linked with another one would bring threads of its own, which wait for the same cores as torch's.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line}
    found = sorted(path for path in paths if _RUNTIME.fullmatch(Path(path).name))
    return min(found, key=lambda path: "/torch" not in path, default="")


def _key(source: Path, compiler: str, runtime: str) -> str:
    facts = (*_texts(source), compiler, _version(compiler), _cpu(), runtime, *_FLAGS)
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]


def _texts(source: Path) -> list[str]:
    """Return the file's text, and those of the headers beside it that it includes, each once."""
    found: dict[Path, str] = {}
    left = [source]
    while left:
        path = left.pop()
        if path not in found:
            found[path] = path.read_text()
            left.extend(path.parent / name for name in _INCLUDE.findall(found[path]))
    return list(found.values())


@functools.cache
def _version(compiler: str) -> str:
    """Return what a compiler says of itself, asked once for all libraries."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout


def _cpu() -> str:
    """Return what tells apart CPUs that run different instructions: home directories are shared between machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return f"{platform.machine()} {line}"
    return f"{platform.machine()} {platform.processor()}"


def writable_directory(directory: Path) -> Path:
    """Return the directory, or a new temporary one where it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(directory, os.W_OK):
            return directory
    except OSError as error:
        logger.info("%s cannot be made: %s.", directory, error)
    return Path(tempfile.mkdtemp(prefix=f"trencadis-{directory.name}-"))


def _load(file: Path) -> ctypes.CDLL | None:
    """Return the library if it is there, whole and loadable: behind its bytes lies their digest."""
    try:
        content = file.read_bytes()
        if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
            logger.warning("%s is damaged and is built again.", file)
            return None
        return ctypes.CDLL(str(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be loaded and is built again: %s.", file, error)
        return None


def _build(source: Path, file: Path, compiler: str, runtime: str) -> None:
    logger.info("Compiling %s with %s, once on this machine.", source.name, compiler)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="building-") as room:
        compiled, linked = Path(room) / "one.o", Path(room) / "one.so"
        threads = ["-fopenmp"] if runtime else []
        command = [compiler, *_FLAGS, *threads, "-c", str(source), "-o", str(compiled)]
        try:
            _run([*command, _NATIVE])
        except BackendError:  # not every compiler knows the option on every machine
            _run(command)
        # Linked by its path and without -fopenmp, which would ask for the compiler's own runtime.
        _run([compiler, "-shared", str(compiled), "-o", str(linked), *([runtime] if runtime else [])])
        content = linked.read_bytes()
        linked.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(linked, file)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{command[0]}: {error}.", hint=INSTALL_HINT) from error
    if done.returncode:
        words = "\n".join((done.stderr or done.stdout).splitlines()[-6:])
        raise BackendError(f"{command[0]} ended with {done.returncode}:\n{words}", hint=INSTALL_HINT)
