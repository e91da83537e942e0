"""C++ of this package becomes a library for this CPU: one that the wheel brought, or one that is compiled once and kept in the user's cache.

    source, instruction set ─▶ the library of the wheel, if it is of the same text
          └▶ with compiler ─▶ key ─▶ cached library, if its digest is right and it is this user's
                                  └▶ compile ▶ link ▶ put in its place at once ▶ load

OpenMP's functions are those of the runtime that torch has loaded: it is made known to all libraries before one of ours is loaded.

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
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import attrs

from trencadis.caches import cache_directory
from trencadis.errors import BackendError
from trencadis_torch import instruction_sets
from trencadis_torch.instruction_sets import AUTO, COMPILERS, FLAGS, TILES, InstructionSet, find_compiler, texts_of

__all__ = [
    "INSTALL_HINT",
    "PREBUILT",
    "Source",
    "cpu_key",
    "find_compiler",
    "instructions",
    "limit_instructions",
    "load_library",
    "openmp_runtime",
    "prepare",
    "why_no_tiles",
    "why_unsafe",
    "writable_directory",
]

logger = logging.getLogger("trencadis.torch")

INSTALL_HINT = (
    "Install a C++ compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name one in CXX."
)

PREBUILT: Final = Path(__file__).with_name("prebuilt")
"""Libraries that a wheel brings."""

_TIMEOUT_S = 300.0
_DIGEST_BYTES = 32
_TRUSTED: Final = frozenset({os.geteuid(), 0})
"""Users whose files are executed."""

_LOCKS: Final[dict[str, threading.Lock]] = {}
_LOCKS_LOCK: Final = threading.Lock()
_TEMPORARY: Final[list[tempfile.TemporaryDirectory[str]]] = []
_WARNED: Final[set[Path]] = set()
_LOADED: Final[set[str]] = set()
"""Names of kernels that this process has loaded."""
_BUILT: Final[list[Path]] = []
"""What this process has compiled."""
_most = AUTO
_ASK_FOR_TILES: Final = (158, 0x1023, 18)
"""``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`` of x86_64; source: Linux, Documentation/arch/x86/xstate.rst."""
_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*\.so[.\d]*")


@attrs.frozen
class Source:
    """A library to be.

    Attributes:
        file: C++ that includes the standard library and headers beside it, by ``#include "name.h"``.
        defines: For the preprocessor, such as ``"FORMATS=3"``: they leave something out, so that less is compiled.
    """

    file: Path
    defines: tuple[str, ...] = ()


def prepare(sources: Iterable[Source], *, directory: Path | None = None) -> bool:
    """Load sources' libraries, those missing in the cache compiled side by side; returns whether none had to be compiled.

    What cannot be compiled is said to those who need it, by :func:`load_library`.
    """
    before = len(_BUILT)
    threads = [
        threading.Thread(target=_prepare, args=(source, directory), name="trencadis-compile", daemon=True)
        for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(_BUILT) == before


def _prepare(source: Source, directory: Path | None) -> None:
    with contextlib.suppress(BackendError):  # who needs the library learns the reason
        load_library(source, directory=directory)


def _announce(text: str) -> None:
    """Announce a long compilation in the log, and on a terminal at any log level."""
    logger.info(text)
    if sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO):
        sys.stderr.write(f"{text}\n")


def limit_instructions(most: str) -> None:
    """Use no better instruction set than this in this process; ``auto``: the best that the CPU has.

    Args:
        most: Name of the set.

    Raises:
        BackendError: The CPU does not have it, or kernels with other ones are loaded already.
    """
    global _most  # noqa: PLW0603 - one for a process, as its libraries are
    with _LOCKS_LOCK:
        if most != _most and _LOADED:
            raise BackendError(
                f'[backend.torch] instructions = "{most}": this process has loaded kernels with "{_most}" already.',
                hint="Engines of one process use the same: give both the same value, or each a process of its own.",
            )
        try:
            instruction_sets.chosen_set(most, flags=_flags())
        except ValueError as error:
            raise BackendError(
                f'[backend.torch] instructions = "{most}": {error}', hint='Choose one, or "auto".'
            ) from error
        if most == TILES and (reason := why_no_tiles()):
            raise BackendError(
                f'[backend.torch] instructions = "{most}": {reason}.', hint='Set "auto", which uses vectors then.'
            )
        _most = most


def instructions() -> InstructionSet | None:
    """Return the set that kernels are chosen for; None: this CPU has none of those, and kernels are compiled for it alone."""
    chosen = instruction_sets.chosen_set(_most, flags=_flags())
    if chosen is None or chosen.name != TILES or not why_no_tiles():
        return chosen
    return instruction_sets.before(chosen)


@functools.cache
def why_no_tiles() -> str:
    """Ask the system for the tiles of AMX, for this process and those that it forks; return why it refuses, empty: they may be used.

    On x86_64 only. It says so in the log, once.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(*(ctypes.c_long(one) for one in _ASK_FOR_TILES)) == 0:
        return ""
    reason = f"the system refuses the tiles of AMX to this process ({os.strerror(ctypes.get_errno())})"
    logger.warning("The CPU has AMX, but %s: products use vectors.", reason)
    return reason


_flags = functools.cache(instruction_sets.cpu_flags)


def load_library(source: Source, *, directory: Path | None = None) -> ctypes.CDLL:
    """Return the library of a C++ file: of the wheel or the cache in milliseconds, else compiled in a few seconds.

    Args:
        source: File to compile.
        directory: Directory of the cache; None is the user's.

    Raises:
        BackendError: There is no compiler, or it fails; the message has its last words.
    """
    texts = texts_of(source.file)
    chosen = instructions()
    if chosen is not None:
        chosen = instruction_sets.narrowed(chosen, texts)
    runtime = openmp_runtime()
    with _lock_of(f"{source.file} {source.defines} {directory}"):
        library = _load_prebuilt(source.file, chosen, texts, runtime) or _load_built(
            source, chosen, texts, runtime, directory
        )
    _LOADED.add(source.file.stem)
    return library


def _load_prebuilt(file: Path, chosen: InstructionSet | None, texts: Iterable[str], runtime: str) -> ctypes.CDLL | None:
    """Return the library that the wheel brought for this text; None: it brought none that can be loaded."""
    if chosen is None or not runtime:
        return None
    path = PREBUILT / instruction_sets.library_name(file, chosen, tuple(texts))
    if not path.is_file():
        return None
    try:
        library = _open(path, runtime)
    except OSError as error:
        logger.warning("%s of the package cannot be loaded, and is compiled: %s.", path.name, error)
        return None
    logger.debug("%s comes with the package, for %s.", file.name, chosen.name)
    return library


def _load_built(
    source: Source, chosen: InstructionSet | None, texts: Iterable[str], runtime: str, directory: Path | None
) -> ctypes.CDLL:
    """Return the library of the cache, compiled if it is not there."""
    compiler = find_compiler()
    if compiler is None:
        raise BackendError(
            f"{source.file.name}: no C++ compiler in PATH ({', '.join(COMPILERS)}) and none in CXX.", hint=INSTALL_HINT
        )
    name = f"{source.file.stem}-{_key(source, texts, compiler, chosen, runtime)}.so"
    asked = directory or cache_directory("native")
    # One that may be read is good enough, such as that of an image.
    library = None if why_unsafe(asked) else _load(asked / name, runtime)
    if library is None:
        file = writable_directory(asked) / name
        library = _load(file, runtime)
    if library is None:
        _build(source, file, compiler, chosen, runtime)
        library = _load(file, runtime)
    if library is None:
        raise BackendError(
            f"{file} was just built and cannot be loaded.", hint='[backend.torch] attention = "sdpa" and pack = "off".'
        )
    return library


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


def _key(source: Source, texts: Iterable[str], compiler: str, chosen: InstructionSet | None, runtime: str) -> str:
    """Return the key of a library: home directories are shared between machines, so it says for which CPU."""
    threads = "threads" if runtime else ""
    options = _options(chosen)
    # Nothing of a runtime is in a library, but whether it has threads.
    facts = (*texts, *source.defines, compiler, _version(compiler), *options, "" if chosen else _cpu(), threads, *FLAGS)
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]


def _options(chosen: InstructionSet | None) -> tuple[str, ...]:
    return ("-march=native",) if chosen is None else chosen.all_options


def _version(compiler: str) -> str:
    """Return what changes with a compiler, without starting it, which each start of an engine would wait for."""
    path = Path(compiler).resolve()
    with contextlib.suppress(OSError):
        facts = path.stat()
        return f"{path} {facts.st_size} {facts.st_mtime_ns}"
    return str(path)


def cpu_key() -> str:
    """Return a key of the CPU, by which packed weights differ: its instruction set here, or all that it has, if that is none of these."""
    chosen = instructions()
    return _cpu() if chosen is None else chosen.name


def _cpu() -> str:
    """Return a key of a CPU whose instructions are in none of the sets."""
    return f"{platform.machine()} {' '.join(sorted(_flags()))} {platform.processor()}"


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
    return why_unsafe(directory) or ("" if os.access(directory, os.W_OK | os.X_OK) else "cannot be written to")


def why_unsafe(directory: Path) -> str:
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


def _load(file: Path, runtime: str) -> ctypes.CDLL | None:
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
        return _open(file, runtime)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be loaded and is built again: %s.", file, error)
        return None


def _open(file: Path, runtime: str) -> ctypes.CDLL:
    """Load a library whose OpenMP functions are those of a runtime that the process has."""
    if runtime:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(file))


def _build(source: Source, file: Path, compiler: str, chosen: InstructionSet | None, runtime: str) -> None:
    while chosen is not None and not instruction_sets.understands(compiler, chosen):
        chosen = instruction_sets.before(chosen)
    what = "this CPU" if chosen is None else chosen.name
    _announce(f"Compiling {source.file.name} for {what}, once on this machine; some seconds ...")
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="building-") as room:
        compiled, linked = Path(room) / "one.o", Path(room) / "one.so"
        command = functools.partial(
            instruction_sets.compile_command,
            compiler,
            source.file,
            compiled,
            defines=source.defines,
            threads=bool(runtime),
        )
        try:
            _run(command(options=_options(chosen)))
        except BackendError:  # not every compiler knows -march=native on every machine
            if chosen is not None:
                raise
            _run(command(options=()))
        _run(instruction_sets.link_command(compiler, compiled, linked))
        linked.chmod(0o700)
        content = linked.read_bytes()
        linked.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(linked, file)
    _BUILT.append(file)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{command[0]}: {error}.", hint=INSTALL_HINT) from error
    if done.returncode:
        words = "\n".join((done.stderr or done.stdout).splitlines()[-6:])
        raise BackendError(f"{command[0]} ended with {done.returncode}:\n{words}", hint=INSTALL_HINT)
