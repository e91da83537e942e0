"""When the whole process stood still: stopped by a signal, a virtual machine that was paused, a processor that others had.

A sibling thread sleeps for a short, fixed time, again and again. When it wakes late, every thread was held up, and the time is charged
to no component. The kernel's own count shows when one thread waited for a processor while the sibling got it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import Final

__all__ = ["PAUSES", "Pauses", "thread_wait_s"]

_PERIOD_S: Final = 0.05
_LATE_S: Final = 0.02
"""A thread that sleeps wakes this much late without any pause."""


class Pauses:
    """Pauses of this process. May be used from several threads."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=256)
        self._woke_s = 0.0
        self._pid = 0

    def watch(self) -> None:
        """Start the sibling thread, if this process has none yet."""
        if self._pid == os.getpid():
            return
        self._pid, self._woke_s = os.getpid(), time.perf_counter()
        threading.Thread(target=self._sleep, name="trencadis-pauses", daemon=True).start()

    def within(self, seconds: float) -> float:
        """Return how many of the last ``seconds`` the process stood still, as far as the sibling has seen."""
        now_s = time.perf_counter()
        since_s = now_s - seconds
        late_s = now_s - self._woke_s - _PERIOD_S
        pauses = [*self._late, *([(now_s, late_s)] if late_s > _LATE_S and self._pid == os.getpid() else [])]
        return sum(max(0.0, end_s - max(since_s, end_s - took_s)) for end_s, took_s in pauses if end_s > since_s)

    def note(self, seconds: float) -> None:
        """Note a pause that ends now."""
        self._late.append((time.perf_counter(), seconds))

    def _sleep(self) -> None:
        while True:
            began_s = self._woke_s = time.perf_counter()
            time.sleep(_PERIOD_S)
            late_s = time.perf_counter() - began_s - _PERIOD_S
            if late_s > _LATE_S:
                self.note(late_s)


PAUSES: Final = Pauses()
"""Those of this process."""


def thread_wait_s() -> float:
    """Return how long the calling thread has waited for a processor in all, seconds; 0 where the system does not count it. 2 µs.

    Source: Linux, Documentation/scheduler/sched-stats.rst, ``/proc/<pid>/schedstat``: time on the processor, time waiting on a run
    queue, both in nanoseconds.
    """
    try:
        return int(os.pread(_file_of_thread(), 100, 0).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


_OWN: Final = threading.local()


class _File:
    """The kernel's counts of the thread that opened it; closed with the thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.number = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # it could not be opened
            os.close(self.number)


def _file_of_thread() -> int:
    """Return the open file of the calling thread; another after a fork."""
    found: _File | None = getattr(_OWN, "file", None)
    if found is None or found.pid != os.getpid():
        found = _OWN.file = _File()
    return found.number
