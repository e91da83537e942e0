"""Counter of tasks in flight on threads, to wait for their end."""

from __future__ import annotations

import threading

__all__ = ["Activity"]


class Activity:
    """Number of tasks in flight. From any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0

    def begin(self, number: int = 1) -> None:
        """Count tasks that were started."""
        with self._changed:
            self._number += number

    def end(self, number: int = 1) -> None:
        """Count tasks that ended or were dropped."""
        with self._changed:
            self._number -= number
            if self._number <= 0:
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no task is in flight; False on timeout.

        Args:
            timeout_s: Seconds of real time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._number <= 0, timeout_s)
