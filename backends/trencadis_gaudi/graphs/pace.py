"""When a backend may prepare what its warm-up put off: in quiet moments, or in a share of each step's time.

A piece of such work cannot be interrupted, so a share of a step is saved up until it pays for one::

    steps   │▪│▪│▪│▪│▪│▪│▪│▪│      each saves step_s
    work            ▪▪▪▪     ▪▪▪▪  as long as what was saved
"""

from __future__ import annotations

from trencadis.clock import Clock

__all__ = ["Pace"]


class Pace:
    """Decides from the time of steps and of pieces of work. One thread.

    Args:
        clock: Read.
        quiet_s: How long no step must have run for the backend to be idle, seconds.
        step_s: What each step saves for the work, seconds; 0: it is done in quiet moments alone.
        expected_s: How long the first piece is taken to be, seconds.
    """

    def __init__(self, clock: Clock, *, quiet_s: float, step_s: float, expected_s: float) -> None:
        self._clock = clock
        self._quiet_s = quiet_s
        self._step_s = step_s
        self._expected_s = expected_s
        self._saved_s = 0.0
        self._last_step_s: float | None = None

    def stepped(self) -> None:
        """Note that a step was submitted."""
        self._last_step_s = self._clock.now_s()
        # What is saved while there is nothing to do must not be spent at once.
        self._saved_s = min(self._saved_s + self._step_s, self._expected_s + self._step_s)

    def allows(self, *, is_idle: bool) -> bool:
        """Return whether a piece of work may run now. Pure.

        Args:
            is_idle: Nothing is being served.
        """
        if not is_idle:
            return self._step_s > 0 and self._saved_s >= self._expected_s
        return self._last_step_s is None or self._clock.now_s() - self._last_step_s >= self._quiet_s

    def took(self, seconds: float, *, is_idle: bool) -> None:
        """Note how long a piece took: the next one is expected to take as long."""
        self._expected_s = seconds
        if not is_idle:
            self._saved_s = max(0.0, self._saved_s - seconds)
