"""Starting up: what it took, phase by phase, garbage collection that does not get in the way, and whose process it is.

process starts ▶ python ▶ command ▶ components ▶ imports ▶ weights ▶ … ▶ ready
                 each phase ends where the next begins: their seconds add up to the time since the process started
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

__all__ = [
    "LEDGER",
    "Ledger",
    "LedgerEntry",
    "claim_process",
    "is_own_process",
    "rare_collections",
    "seconds_since_start",
]

RARELY: Final = 50_000
"""Objects made, less those freed, between collections of the young: by default 700."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds as each of the contexts that are open now found them."""

_STARTED: Final = 19
"""Of the fields behind the name in ``/proc/self/stat``: when the process started, clock ticks since the system did. Source: proc(5)."""

_own = False


def claim_process() -> None:
    """Note that no code but Trencadís' own and that of plugins runs in this process."""
    global _own  # noqa: PLW0603 - one for the process
    _own = True


def is_own_process() -> bool:
    """Return whether a command of Trencadís, or an engine that one started, is all that this process is for."""
    return _own


def seconds_since_start() -> float:
    """Return the time since this process started, seconds, to 0.01 s; where the system does not say it, since the first call."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[_STARTED])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _FIRST_S


_FIRST_S: Final = time.perf_counter()


class LedgerEntry(NamedTuple):
    """One phase of a start.

    Attributes:
        phase: Its name.
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
    """

    def __init__(self, since_start_s: Callable[[], float] = seconds_since_start) -> None:
        self._since_start_s = since_start_s
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

    def close(self) -> None:
        """End the last phase: what comes later is no start. May be called twice."""
        self.begin(self._name)
        with self._lock:
            self._is_closed = True

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Phases in order of their beginnings; the one that runs is counted as far as it was when the last one ended."""
        with self._lock:
            return tuple(LedgerEntry(name, took_s, self._cached.get(name)) for name, took_s in self._took_s.items())

    def in_words(self) -> str:
        """Return the whole and its phases: ``4.1 s: python 0.2 s, … kernels 0.1 s (cached)``."""
        notes = {None: "", True: " (cached)", False: " (not cached)"}
        parts = (f"{one.phase} {one.seconds:.2f} s{notes[one.cached]}" for one in self.entries)
        return f"{sum(one.seconds for one in self.entries):.2f} s: {', '.join(parts)}"


LEDGER: Final = Ledger()
"""Of this process."""


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
