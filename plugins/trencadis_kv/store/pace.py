"""Throttling of loads: while the engine computes, loading threads rest between calls as long as their deadline allows.

A load and a step share processors, caches and memory bandwidth. A load is short, so it delays the tokens of few steps;
spread over many steps, the same work is not noticed::

    no step lately      ▸ no rest
    else                  work ▪▪ rest ······ work ▪▪ rest ······ │ no rest beyond what the load may take

Work is a thread's processor time: a thread that waits for a network disturbs no other. Short rests are merged to longer ones. All loads
have one common share of the time. Loads that wait for a thread shorten the rests of running ones. If steps are computed on a device, no
load rests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

from trencadis.clock import Clock
from trencadis_kv.store.cost import CostModel

__all__ = ["LoadPace", "Pace"]

_LIMIT: Final = 0.75
"""Fraction of the load's time-out, and of the time that computing would take (and disturb others), in which a load with
rests must end."""
_LEAST_S: Final = 0.1
"""Shortest rest: after each one, caches are cold, and a processor has to be woken up; a load that rests five times as
often takes twice the processor time."""
_LATELY: Final = 3.0
"""Time after a step for which the engine counts as computing, in durations of that step: a step may have to wait, too."""
_LATELY_S: Final = 0.02
"""Lower limit of that time, seconds."""


class Pace:
    """Tracks whether the engine computes and how many loads are running. From any thread.

    Args:
        share: Fraction of the time that loads work while the engine computes, over 0 .. 1; 1: they never rest.
        cost: Predicts the time to compute tokens.
        clock: The engine's clock.
        cpu_s: Returns the processor time of the thread that calls it, seconds.
        least_s: Shortest rest, seconds; shorter ones are added up until they are as long.

    Attributes:
        is_needed: Whether steps are computed by the processors that loads work on.
    """

    is_needed: bool = True

    def __init__(
        self,
        share: float,
        *,
        cost: CostModel,
        clock: Clock,
        cpu_s: Callable[[], float] = time.thread_time,
        least_s: float = _LEAST_S,
    ) -> None:
        self._share = share
        self._cost = cost
        self._clock = clock
        self._cpu_s = cpu_s
        self._least_s = least_s
        self._lock = threading.Lock()
        self._loads: set[LoadPace] = set()
        self._computes_until_s = -math.inf

    def stepped(self, *, device_s: float) -> None:
        """Called when a step with tokens ended.

        Args:
            device_s: Duration of the step, seconds.
        """
        self._computes_until_s = self._clock.now_s() + max(_LATELY * device_s, _LATELY_S)

    def load(self, num_tokens: int, *, wait_s: float) -> LoadPace:
        """Return the throttle of a load that is queued now.

        Args:
            num_tokens: Number of tokens that would have to be computed without the load.
            wait_s: Seconds after which the load is given up.
        """
        compute_s = self._cost.compute_s(num_tokens)
        longest_s = wait_s if math.isnan(compute_s) else min(wait_s, compute_s)
        load = LoadPace(self, self._clock, self._cpu_s, limit_s=_LIMIT * longest_s, least_s=self._least_s)
        with self._lock:
            self._loads.add(load)
        return load

    def ended(self, load: LoadPace) -> None:
        """Called when a load ended or was dropped."""
        with self._lock:
            self._loads.discard(load)

    @property
    def rest_ratio(self) -> float:
        """Seconds to rest per second of work; 0: no rest."""
        if not self.is_needed or self._share >= 1.0 or self._clock.now_s() >= self._computes_until_s:
            return 0.0
        with self._lock:
            num_running = sum(load.is_running for load in self._loads)
            num_waiting = len(self._loads) - num_running
        return (max(1, num_running) / self._share - 1.0) / (1 + num_waiting)


class LoadPace:
    """Throttle of one load. For its thread, except :meth:`end`.

    Args:
        pace: Throttle of all loads.
        clock: The engine's clock.
        cpu_s: Returns the processor time of the thread that calls it, seconds.
        limit_s: Seconds from now within which the load must end, rests included.
        least_s: Shortest rest, seconds.

    Attributes:
        is_running: True once the load has begun.
    """

    def __init__(self, pace: Pace, clock: Clock, cpu_s: Callable[[], float], *, limit_s: float, least_s: float) -> None:
        self._pace = pace
        self._clock = clock
        self._cpu_s = cpu_s
        self._end_s = clock.now_s() + limit_s
        self._least_s = least_s
        self._since_s = self._since_cpu_s = self._took_s = self._owed_s = 0.0
        self.is_running = False

    @property
    def gives_way(self) -> bool:
        """Whether the engine computes, so that a load should use one processor only."""
        return self._pace.rest_ratio > 0.0

    def begin(self) -> None:
        """Start the clock, on this thread."""
        self.is_running = True
        self._since_s, self._since_cpu_s = self._clock.now_s(), self._cpu_s()

    def end(self) -> None:
        """Stop; may be called twice."""
        self._pace.ended(self)

    def rest_s(self, done: float) -> float:
        """Return how long to rest now, seconds; the time to the next call counts as rest and work.

        Args:
            done: Fraction of the load that is done, over 0 .. 1.
        """
        now_s, cpu_s = self._clock.now_s(), self._cpu_s()
        piece_s, work_s = now_s - self._since_s, cpu_s - self._since_cpu_s
        self._took_s += piece_s
        left_s = self._took_s * (1.0 - done) / done
        spare_s = self._end_s - now_s - left_s - self._owed_s
        if piece_s > 0.0 and left_s > 0.0 and spare_s > 0.0:
            # Each piece gets its share of the spare time.
            self._owed_s += min(work_s * self._pace.rest_ratio, spare_s * piece_s / (piece_s + left_s))
        rest_s = self._owed_s if left_s > 0.0 and self._owed_s >= self._least_s else 0.0
        self._owed_s -= rest_s
        self._since_s, self._since_cpu_s = now_s + rest_s, cpu_s
        return rest_s
