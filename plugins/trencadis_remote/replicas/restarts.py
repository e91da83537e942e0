"""How often a replica is started again."""

from __future__ import annotations

import threading
from collections import deque

from trencadis.clock import Clock

__all__ = ["RestartLimit"]


class RestartLimit:
    """At most so many restarts of one replica within a time; what is beyond waits. From any thread.

    Args:
        max_restarts: Within ``window_s``; 0: there is never one.
        window_s: Seconds.
        clock: Measures them.
    """

    def __init__(self, *, max_restarts: int, window_s: float, clock: Clock) -> None:
        self._window_s = window_s
        self._clock = clock
        self._begun_s: deque[float] = deque(maxlen=max_restarts)
        self._lock = threading.Lock()

    def delay_s(self) -> float | None:
        """Return how long the next restart has to wait, seconds, and count it; None: there is none."""
        if self._begun_s.maxlen == 0:
            return None
        with self._lock:
            now_s = self._clock.now_s()
            is_full = len(self._begun_s) == self._begun_s.maxlen
            begin_s = max(now_s, self._begun_s[0] + self._window_s) if is_full else now_s
            self._begun_s.append(begin_s)
            return begin_s - now_s
