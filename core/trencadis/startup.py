"""Starting up: what it took, phase by phase, garbage collection that does not get in the way, and whose process it is.

process starts ▶ python ▶ command ▶ components ▶ imports ▶ weights ▶ … ▶ ready
                 each phase ends where the next begins: their seconds add up to the time since the process started

With an engine in a process of its own, whose phases are taken off the one that waits for it:

process starts ▶ python ▶ command ▶ server ▶ engine process ──────────────────────────────────────────────▶ ready
                                             starts ▶ engine's python ▶ … ▶ imports ▶ weights ▶ … ▶ ready ─┘
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from trencadis.caches import cache_directory

__all__ = [
    "LEDGER",
    "Ledger",
    "LedgerEntry",
    "claim_process",
    "end_start",
    "is_own_process",
    "keep_last_start",
    "last_start",
    "rare_collections",
    "release_freed",
    "seconds_since_start",
    "start_in_words",
]

RARELY: Final = 50_000
"""Objects made, less those freed, between collections of the young: by default 700."""

logger = logging.getLogger("trencadis.engine")

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds as each of the contexts that are open now found them."""

_STARTED: Final = 19
"""Index, among the fields behind the name in ``/proc/self/stat``, of the time when the process started, clock ticks since the system did. Source: proc(5)."""

_own = False


def claim_process() -> None:
    """Note that no code but Trencadís' own and that of plugins runs in this process."""
    global _own  # noqa: PLW0603 - one for the process
    _own = True


def is_own_process() -> bool:
    """Return whether a command of Trencadís, or an engine that one started, is all that this process is for."""
    return _own


def seconds_since_start() -> float:
    """Return the time since this process started, seconds, to 0.01 s; where the system does not say it, since this was imported."""
    return time.perf_counter() - _FIRST_S + _before_import_s()


@functools.cache
def _before_import_s() -> float:
    """Return what had passed when this module was imported, seconds; 0 where the system does not say it."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[_STARTED])
        since_start_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return max(0.0, since_start_s - (time.perf_counter() - _FIRST_S))


_FIRST_S: Final = time.perf_counter()


class LedgerEntry(NamedTuple):
    """One phase of a start.

    Attributes:
        phase: Name of the phase.
        seconds: How long it took, all times together if it came again.
        cached: Whether what it needed was in a cache; None: it needs none.
    """

    phase: str
    seconds: float
    cached: bool | None


class Ledger:
    """What the start of a process took, phase by phase, without gaps; the first phase began with the process.

    Args:
        since_start_s: Returns the seconds since the process started.

    Attributes:
        is_part: Another process started this one, and takes its ledger in: nothing is told of it here.
    """

    def __init__(self, since_start_s: Callable[[], float] = seconds_since_start) -> None:
        self._since_start_s = since_start_s
        self.is_part = False
        self._name = "python"
        self._since_s = 0.0
        self._took_s: dict[str, float] = {self._name: 0.0}
        self._cached: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def begin(self, name: str) -> None:
        """End the phase and begin another one; does nothing once the start is over."""
        with self._lock:
            if self._is_closed:
                return
            now_s = self._since_start_s()
            self._took_s[self._name] += now_s - self._since_s
            self._took_s.setdefault(name, 0.0)
            self._name, self._since_s = name, now_s

    def note_cache(self, *, found: bool) -> None:
        """Note of the phase that runs whether something was in a cache; once it was not, the phase counts as without."""
        with self._lock:
            if not self._is_closed:
                self._cached[self._name] = self._cached.get(self._name, True) and found

    def include(self, entries: Iterable[LedgerEntry]) -> None:
        """Take in what another process did in the phase that runs, which keeps the rest; does nothing once the start is over.

        Args:
            entries: Entries of the engine's ledger; a name that this one has is told as the engine's.
        """
        self.begin(self._name)
        with self._lock:
            for name, seconds, cached in () if self._is_closed else entries:
                own = f"engine's {name}" if name in self._took_s else name
                # Starts of processes are known to a hundredth of a second: what came from there may be longer than it took here.
                self._took_s[own] = min(seconds, self._took_s[self._name])
                self._took_s[self._name] -= self._took_s[own]
                if cached is not None:
                    self._cached[own] = cached

    def close(self) -> bool:
        """End the last phase: what comes later is no start. Returns whether it was open."""
        self.begin(self._name)
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
        return was_open

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Phases in order of their beginnings; the one that runs is counted as far as it was when the last one ended."""
        with self._lock:
            return tuple(LedgerEntry(name, took_s, self._cached.get(name)) for name, took_s in self._took_s.items())

    def in_words(self) -> str:
        """Return the whole and its phases: ``4.1 s: python 0.2 s, … kernels 0.1 s (cached)``."""
        return start_in_words(self.entries)

    def metrics(self) -> str:
        """Return the same in Prometheus' text format."""
        name = "trencadis_start_seconds"
        lines = [
            f"# HELP {name} What the start took until an engine served, phase by phase; cached: whether what it needed was in a cache.",
            f"# TYPE {name} gauge",
        ]
        for phase, seconds, cached in self.entries:
            labels = f'phase="{phase}",cached="{_CACHED[cached]}"'
            lines.append(f"{name}{{{labels}}} {seconds:.3f}")
        return "\n".join(lines) + "\n"


_SHOWN_S: Final = 0.005
_CACHED: Final = {None: "", True: "yes", False: "no"}


def start_in_words(entries: Iterable[LedgerEntry]) -> str:
    """Return a sum and what it is made of, without what took no time. Pure.

    Args:
        entries: Entries of a ledger.
    """
    notes = {None: "", True: " (from cache)", False: " (not from cache)"}
    every = tuple(one for one in entries if one.seconds >= _SHOWN_S)
    parts = (f"{one.phase} {one.seconds:.2f} s{notes[one.cached]}" for one in every)
    return f"{sum(one.seconds for one in every):.2f} s: {', '.join(parts)}"


LEDGER: Final = Ledger()
"""The ledger of this process."""


def end_start(model: str) -> None:
    """Close the ledger of this process, tell it in the log, and keep it; once, and not in a process whose ledger another takes in.

    Args:
        model: Name of the model that was loaded.
    """
    if LEDGER.close() and not LEDGER.is_part:
        logger.info("The start took %s.", LEDGER.in_words())
        if is_own_process():
            keep_last_start(model)


def keep_last_start(model: str, ledger: Ledger = LEDGER) -> None:
    """Keep a ledger in the user's cache, for ``trencadis doctor``; does nothing where it cannot be kept.

    Args:
        model: Name of the model that was loaded.
        ledger: This process's, if none.
    """
    with contextlib.suppress(OSError):
        file = _last_start_file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        room = file.with_name(f"{file.name}.{os.getpid()}")
        room.write_text(json.dumps({"model": model, "phases": ledger.entries}), encoding="utf-8")
        os.replace(room, file)


def last_start() -> tuple[str, tuple[LedgerEntry, ...]] | None:
    """Return what the last start of this user loaded, and its ledger; None: there is none, or it cannot be read."""
    try:
        kept = json.loads(_last_start_file().read_text(encoding="utf-8"))
        entries = (LedgerEntry(str(phase), float(took_s), cached) for phase, took_s, cached in kept["phases"])
        return str(kept["model"]), tuple(one for one in entries if one.cached in (None, True, False))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_start_file() -> Path:
    return cache_directory("last_start.json")


def release_freed() -> None:
    """Give freed memory back to the system, where the C library is glibc: it keeps most of what was freed in small pieces.

    Reading a tokenizer of 262,144 tokens frees 200 MB, as the peak of a process that loads a model afterwards shows.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely while a process loads, and as before afterwards; contexts may overlap in several threads.

    Loading makes hundreds of thousands of objects that stay, and each collection looks for garbage among them in vain: a sixth of the
    time that it takes to import torch and transformers.
    """
    with _lock:
        young, middle, old = gc.get_threshold()
        _before.append((young, middle, old))
        if young:  # 0: somebody has switched collections off
            gc.set_threshold(max(young, RARELY), middle, old)
    try:
        yield
    finally:
        with _lock:
            if len(_before) == 1:
                gc.set_threshold(*_before[0])
                _before.clear()
            else:
                _before.pop()
