"""C++ beside this package becomes a library of this machine: compiled when it is first needed, and kept in the user's cache.

    source, compiler, CPU, OpenMP runtime ─▶ key ─▶ cached library, if its digest is right and it is this user's
                                                 └▶ compile ▶ link ▶ put in its place at once ▶ load

Any number of processes may do so at the same time: each builds a file of its own, and the last one in place is as good as the first.
Code is loaded from directories and files only that belong to this user or root, and that no other may write to.
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
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import attrs

from trencadis.errors import BackendError

__all__ = [
    "INSTALL_HINT",
    "Source",
    "begin",
    "cache_directory",
    "find_compiler",
    "load_library",
    "openmp_runtime",
    "writable_directory",
]

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
_TRUSTED: Final = frozenset({os.geteuid(), 0})
"""Users whose files are executed."""

_LOCKS: Final[dict[str, threading.Lock]] = {}
_LOCKS_LOCK: Final = threading.Lock()
_TEMPORARY: Final[list[tempfile.TemporaryDirectory[str]]] = []
_WARNED: Final[set[Path]] = set()
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*\.so[.\d]*")


@attrs.frozen
class Source:
    """A library to be.

    Attributes:
        file: C++ that includes the standard library and headers beside it, by ``#include "name.h"``.
        defines: For the preprocessor, such as ``"FORMATS=3"``.
    """

    file: Path
    defines: tuple[str, ...] = ()


def begin(sources: Iterable[Source], *, directory: Path | None = None) -> None:
    """Compile sources missing in the cache, in parallel threads; :func:`load_library` waits for them."""
    for source in sources:
        thread = threading.Thread(target=_begin, args=(source, directory), name="trencadis-compile", daemon=True)
        thread.start()


def _begin(source: Source, directory: Path | None) -> None:
    with contextlib.suppress(BackendError):  # who needs the library learns the reason
        load_library(source, directory=directory)


def _announce(text: str) -> None:
    """Announce a long compilation in the log, and on a terminal at any log level."""
    logger.info(text)
    if sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO):
        sys.stderr.write(f"{text}\n")


def load_library(source: Source, *, directory: Path | None = None) -> ctypes.CDLL:
    """Return the library of a C++ file, compiled if the cache does not have it; a few seconds then, else milliseconds.

    Args:
        source: What to compile.
        directory: Of the cache; None is the user's.

    Raises:
        BackendError: There is no compiler, or it fails; the message has its last words.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BackendError(
            f"{source.file.name}: no C++ compiler in PATH ({', '.join(_COMPILERS)}) and none in CXX.", hint=INSTALL_HINT
        )
    runtime = openmp_runtime()
    name = f"{source.file.stem}-{_key(source, compiler, runtime)}.so"
    asked = directory or cache_directory()
    with _lock_of(name):
        # One that may be read is good enough, such as that of an image.
        library = None if _why_unsafe(asked) else _load(asked / name)
        if library is None:
            file = writable_directory(asked) / name
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
    """Return the cache directory of compiled code: ``$XDG_CACHE_HOME/trencadis/<kind>``, by default under ``~/.cache``."""
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


def _key(source: Source, compiler: str, runtime: str) -> str:
    facts = (*_texts(source.file), *source.defines, compiler, _version(compiler), _cpu(), runtime, *_FLAGS)
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
    """Return the version text of a compiler, asked once for all libraries."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout


def _cpu() -> str:
    """Return a key of the CPU's instruction set: home directories are shared between machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return f"{platform.machine()} {line}"
    return f"{platform.machine()} {platform.processor()}"


def writable_directory(directory: Path) -> Path:
    """Return the directory, made if there is none, or another one that is kept as long as temporary files are.

    That is one where this directory cannot be written to, belongs to another user, or may be written to by others: compiled code that
    lies there is executed. Where the other one is no better, it is a new one, and removed when the process ends.
    """
    reason = _why_unusable(directory)
    if not reason:
        return directory
    other = Path(tempfile.gettempdir()) / f"trencadis-{os.geteuid()}" / directory.name
    if _why_unusable(other):
        made = tempfile.TemporaryDirectory(prefix=f"trencadis-{directory.name}-")
        _TEMPORARY.append(made)
        other = Path(made.name)
    if directory not in _WARNED:
        _WARNED.add(directory)
        logger.warning(
            "Compiled code is kept in %s, for %s %s. Name a directory of this user's own, mode 0700: XDG_CACHE_HOME.",
            other,
            directory,
            reason,
        )
    return other


def _why_unusable(directory: Path) -> str:
    """Return why compiled code cannot be put into a directory, which is made if there is none; empty: it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    return _why_unsafe(directory) or ("" if os.access(directory, os.W_OK | os.X_OK) else "cannot be written to")


def _why_unsafe(directory: Path) -> str:
    """Return why files in a directory must not be executed: another user may have put them there. Empty: they may.

    Directories above count as well: who may rename what is in them decides what lies here.
    """
    try:
        real = directory.resolve(strict=True)
        for place in (real, *real.parents):
            facts = place.stat()
            if facts.st_uid not in _TRUSTED:
                return f"belongs to user {facts.st_uid}" if place == real else f"lies in {place} of user {facts.st_uid}"
            # In a sticky directory such as /tmp a user cannot replace the files of others. Groups above are often the user's own.
            others = stat.S_IWGRP | stat.S_IWOTH if place == real else stat.S_IWOTH
            if facts.st_mode & others and not (facts.st_mode & stat.S_ISVTX and place != real):
                mode = f"mode {stat.S_IMODE(facts.st_mode):04o}"
                return f"may be written to by others ({mode})" if place == real else f"lies in {place} ({mode})"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _lock_of(name: str) -> threading.Lock:
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(name, threading.Lock())


def _load(file: Path) -> ctypes.CDLL | None:
    """Return the library if it is there, whole and loadable: after its bytes lies their digest."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            facts = os.fstat(opened.fileno())
            if facts.st_uid not in _TRUSTED or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                logger.warning("%s is not this user's alone and is built again.", file)
                return None
            content = opened.read()
        if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
            logger.warning("%s is damaged and is built again.", file)
            return None
        return ctypes.CDLL(str(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be loaded and is built again: %s.", file, error)
        return None


def _build(source: Source, file: Path, compiler: str, runtime: str) -> None:
    _announce(f"Compiling {source.file.name} for this CPU, once on this machine; some seconds ...")
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="building-") as room:
        compiled, linked = Path(room) / "one.o", Path(room) / "one.so"
        threads = ["-fopenmp"] if runtime else []
        defines = [f"-D{define}" for define in source.defines]
        command = [compiler, *_FLAGS, *threads, *defines, "-c", str(source.file), "-o", str(compiled)]
        try:
            _run([*command, _NATIVE])
        except BackendError:  # not every compiler knows the option on every machine
            _run(command)
        # Linked by its path and without -fopenmp, which would ask for the compiler's own runtime.
        _run([compiler, "-shared", str(compiled), "-o", str(linked), *([runtime] if runtime else [])])
        linked.chmod(0o700)
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
