"""How much work is in flight on threads, so that its end can be waited for."""

from __future__ import annotations

import threading

__all__ = ["Activity"]


class Activity:
    """A number of tasks under way. From any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0

    def begin(self, number: int = 1) -> None:
        """Note tasks that will be done."""
        with self._changed:
            self._number += number

    def end(self, number: int = 1) -> None:
        """Note tasks that are done, or will not be."""
        with self._changed:
            self._number -= number
            if self._number <= 0:
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False if that takes longer.

        Args:
            timeout_s: Seconds of real time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._number <= 0, timeout_s)
