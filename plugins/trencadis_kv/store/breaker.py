"""Circuit breaker of a store: repeated failures open it; a probe with one small object closes it.

closed ── failure_limit failures in failure_window_s ──▶ open
  ▲                                                       │ cooldown_s
  └──────────── the probe worked ◀── half open ◀──────────┘
                                         └─ it failed ──▶ open
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from enum import IntEnum

from trencadis.clock import Clock
from trencadis.records import TransferCause

__all__ = ["BREAKING_CAUSES", "Breaker", "BreakerState"]

logger = logging.getLogger("trencadis.kv")

BREAKING_CAUSES = frozenset(
    {
        TransferCause.DEADLINE,
        TransferCause.UNREACHABLE,
        TransferCause.CORRUPT,
        TransferCause.LOST,
        TransferCause.RAISED,
    }
)
"""Failures that say something about the store; an evicted object or a full store is normal."""


class BreakerState(IntEnum):
    """State of a circuit breaker; the numbers are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Circuit breaker that counts a store's failures. From any thread.

    Args:
        clock: The engine's clock.
        name: Name of the connector, for the log.
        failure_limit: Number of failures that open it.
        failure_window_s: Time within which these failures must occur, seconds.
        cooldown_s: Time that it stays open before the store is tried, seconds.
    """

    def __init__(
        self, clock: Clock, *, name: str, failure_limit: int, failure_window_s: float, cooldown_s: float
    ) -> None:
        self._clock = clock
        self._name = name
        self._window_s = failure_window_s
        self._cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._failures: deque[float] = deque(maxlen=failure_limit)
        self._limit = failure_limit
        self._state = BreakerState.CLOSED
        self._since_s = 0.0

    @property
    def state(self) -> BreakerState:
        """Present state."""
        return self._state

    @property
    def allows(self) -> bool:
        """True while the store may be used."""
        return self._state is BreakerState.CLOSED

    @property
    def half_open_s(self) -> float:
        """Seconds since the running probe was requested; 0 if there is none."""
        with self._lock:
            return self._clock.now_s() - self._since_s if self._state is BreakerState.HALF_OPEN else 0.0

    def failed(self, cause: str) -> None:
        """Count a failure, unless the store is not its cause."""
        if cause not in BREAKING_CAUSES:
            return
        now_s = self._clock.now_s()
        with self._lock:
            self._failures.append(now_s)
            oldest_s = self._failures[0]
            full = len(self._failures) == self._limit and now_s - oldest_s <= self._window_s
            if not full or self._state is not BreakerState.CLOSED:
                return
            self._open(now_s)
        logger.warning(
            "The KV store of %s failed %d times within %.3g s (last: %s) and is left alone; it is tried again in %g s.",
            self._name,
            self._limit,
            now_s - oldest_s,
            cause,
            self._cooldown_s,
        )

    def open(self) -> None:
        """Stop using the store."""
        with self._lock:
            self._open(self._clock.now_s())

    def wants_probe(self) -> bool:
        """Return True, to one caller, when a probe is due; :meth:`probed` must follow."""
        with self._lock:
            now_s = self._clock.now_s()
            if self._state is not BreakerState.OPEN or now_s - self._since_s < self._cooldown_s:
                return False
            self._state, self._since_s = BreakerState.HALF_OPEN, now_s
            return True

    def probed(self, *, works: bool) -> None:
        """Record the probe's result."""
        with self._lock:
            is_news = works and self._state is not BreakerState.CLOSED
            if works:
                self._state = BreakerState.CLOSED
                self._failures.clear()
            else:
                self._open(self._clock.now_s())
        if is_news:
            logger.info("The KV store of %s works again.", self._name)

    def _open(self, now_s: float) -> None:
        self._state, self._since_s = BreakerState.OPEN, now_s
