"""Cost model: predicts the time of loading and of computing from recent measurements."""

from __future__ import annotations

import math
import threading

from trencadis.clock import Clock, SystemClock

__all__ = ["CostModel", "MovingLine"]

_DECAY = 0.95
_MIN_STEP_TOKENS = 64
"""Least tokens of a measured step: smaller steps are mostly overhead and decodes, and say little about a token of a long prompt."""
_SAME = 1e-6
_GUESS = 2.0
"""Median of a duration of which only a lower limit is known, in units of that limit, if all orders of magnitude are
equally likely beforehand: P(T > x | T > t) = t / x."""


class MovingLine:
    """Line ``y = latency + x * slope`` through recent points; older ones weigh less, and neither parameter is negative.

    Source: least squares with exponentially decaying weights; textbook.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        self._weight = self._weight * _DECAY + 1.0
        self._x = self._x * _DECAY + x
        self._y = self._y * _DECAY + y
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * y

    def at(self, x: float) -> float:
        """Return the line's value; nan before the first point. Pure."""
        if not self._weight:
            return math.nan
        spread = self._weight * self._xx - self._x * self._x
        if spread <= _SAME * self._weight * self._xx:
            return self._through_zero(x)
        slope = (self._weight * self._xy - self._x * self._y) / spread
        latency = (self._y - slope * self._x) / self._weight
        if slope < 0.0:
            return self._y / self._weight
        return latency + slope * x if latency >= 0.0 else self._through_zero(x)

    def _through_zero(self, x: float) -> float:
        return x * self._xy / self._xx if self._xx else self._y / self._weight


class CostModel:
    """Predicts seconds of loads and of prefills. From any thread.

    Measurements of loads expire: if nothing is loaded because a store was slow, nothing else would show that it no
    longer is.

    Args:
        clock: The engine's clock; None: the system's.
        max_age_s: Seconds after the newest load for which loads are predicted.
        retry_s: Seconds after a load that was given up for which loads are predicted: it need not be typical of the
            store.
    """

    def __init__(self, clock: Clock | None = None, *, max_age_s: float = 60.0, retry_s: float = 5.0) -> None:
        self._clock = clock or SystemClock()
        self._max_age_s = max_age_s
        self._retry_s = min(retry_s, max_age_s)
        self._lock = threading.Lock()
        self._loads = MovingLine()
        self._believed_until_s = -math.inf
        self._tokens = self._seconds = 0.0

    def loaded(self, *, num_bytes: int, seconds: float) -> None:
        """Add the measurement of one call for objects of so many bytes."""
        with self._lock:
            now_s = self._clock.now_s()
            if now_s > self._believed_until_s:
                self._loads = MovingLine()
            self._loads.add(num_bytes, seconds)
            self._believed_until_s = now_s + self._max_age_s

    def gave_up(self, *, num_bytes: int, seconds: float) -> None:
        """Add the measurement of a call that was given up after a time.

        A call that was given up before its predicted end says nothing. Otherwise earlier measurements are dropped, and
        not averaged with this one: the next load would be given up, too. The full duration of the call is unknown; its
        estimate is twice the time that it had.
        """
        with self._lock:
            now_s = self._clock.now_s()
            if now_s <= self._believed_until_s and seconds <= self._loads.at(num_bytes):
                return
            self._loads = MovingLine()
            self._loads.add(num_bytes, _GUESS * seconds)
            self._believed_until_s = now_s + self._retry_s

    def computed(self, *, num_tokens: int, seconds: float) -> None:
        """Add the measurement of a step; one with few tokens is ignored."""
        if num_tokens < _MIN_STEP_TOKENS or seconds <= 0.0:
            return
        with self._lock:
            self._tokens = self._tokens * _DECAY + num_tokens
            self._seconds = self._seconds * _DECAY + seconds

    def load_s(self, num_bytes: int, *, call_bytes: int) -> float:
        """Return the predicted time of a load, seconds; nan without recent measurements.

        Args:
            num_bytes: Bytes of the whole load.
            call_bytes: Most bytes of one call; the latency counts once for each call.
        """
        with self._lock:
            if self._clock.now_s() > self._believed_until_s:
                return math.nan
            whole, rest = divmod(num_bytes, call_bytes)
            seconds = whole * self._loads.at(call_bytes) if whole else 0.0
            return seconds + self._loads.at(rest) if rest else seconds

    def compute_s(self, num_tokens: int) -> float:
        """Return the predicted time of computing, seconds; nan without measurements. Pure."""
        with self._lock:
            return num_tokens * self._seconds / self._tokens if self._tokens else math.nan
