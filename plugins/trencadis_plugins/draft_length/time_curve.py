"""Step time as a function of the number of tokens, learned from running steps."""

from __future__ import annotations

import bisect
import itertools
from collections import deque

import numpy as np
import numpy.typing as npt

from trencadis.records import Int64Array

__all__ = ["TimeCurve"]

_NUM_SAMPLES = 16
_RANK = 8
"""Number of measurements of which one is taken to have been too short by chance: the least but one of sixteen counts."""

_EXACT = 64
"""Sizes up to here are kept apart; above, sizes closer than a sixteenth are one."""

_WIDE = 1.25
"""From this ratio of the largest to the smallest size on, the line through their times is trusted."""

_KEPT = 512
"""Measurements after which a size that was not seen again is forgotten: contexts grow and shrink meanwhile."""

_KEPT_ONCE = 256
"""The same for a size that was seen once: its one step may have been slow, and who avoids it for that would never know."""


class TimeCurve:
    """Seconds by size, from noisy measurements.

    At a size that was measured lately: nearly the least of the last sixteen, for what else a machine does only makes steps longer; the
    first measurement of all is left out, for what runs then runs for the first time, and a size that was measured once while others
    were measured more often. Where a larger size was quicker, a smaller one takes no longer: more is never done in less time, so what
    says so is noise of the smaller one.
    Between two such sizes on the line through them; up to twice the largest on the line through the smallest and the largest, if they
    are far enough apart. Elsewhere in proportion to ``base + size``.

    Args:
        base: Size at which the fixed part of the cost is half of it; 0: there is none.
    """

    def __init__(self, *, base: float) -> None:
        self._base = base
        self._samples: dict[int, deque[float]] = {}
        self._last_seen: dict[int, int] = {}
        self._num_added = 0
        self._sizes: list[int] = []
        self._values: list[float] = []
        self._curve: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None  # None: to be made

    @property
    def is_known(self) -> bool:
        """True once anything was measured."""
        return bool(self._sizes)

    def add(self, size: int, seconds: float) -> None:
        """Count a measurement, but for the first; one that is not positive says nothing. About 10 µs."""
        if size <= 0 or not seconds > 0:
            return
        size = _rounded(size)
        self._num_added += 1
        if self._num_added == 1:
            return
        samples = self._samples.get(size)
        if samples is None:
            samples = self._samples[size] = deque(maxlen=_NUM_SAMPLES)
            place = bisect.bisect_left(self._sizes, size)
            self._sizes.insert(place, size)
            self._values.insert(place, seconds)
        samples.append(seconds)
        self._last_seen[size] = self._num_added
        self._values[bisect.bisect_left(self._sizes, size)] = sorted(samples)[(len(samples) - 1) // _RANK]
        if self._num_added % _EXACT == 0:
            self._forget()
        self._curve = None

    def at(self, sizes: Int64Array) -> npt.NDArray[np.float64]:
        """Return the seconds at each size; in an arbitrary unit if nothing was measured. About 3 µs, more after a measurement."""
        if not self._sizes:
            return np.asarray(sizes + max(self._base, 1.0), np.float64)
        if self._curve is None:
            self._curve = self._extended()
        return np.interp(sizes, *self._curve)

    def _extended(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the measured points between one at 0 and two beyond: twice the last size, and far away."""
        sizes, values = self._sizes, self._values
        is_sure = [len(self._samples[size]) > 1 for size in sizes]
        if any(is_sure):
            sizes, values = list(itertools.compress(sizes, is_sure)), list(itertools.compress(values, is_sure))
        first, last, base = sizes[0], sizes[-1], self._base
        values = _rising(values)
        fastest, slowest = values[0], values[-1]
        twice = slowest * (base + 2 * last) / (base + last)
        if last >= _WIDE * first:
            # What was measured knows better than the proportion whether more tokens cost more.
            twice = slowest + max(slowest - fastest, 0.0) / (last - first) * last
        far = 1024 * last
        points = (
            (0, fastest * base / (base + first)),
            (2 * last, twice),
            (far, twice * (base + far) / (base + 2 * last)),
        )
        (zero, low), *beyond = points
        ends, highs = zip(*beyond, strict=True)
        return np.array([zero, *sizes, *ends], np.float64), np.array([low, *values, *highs])

    def _forget(self) -> None:
        kept = {size: _KEPT if len(samples) > 1 else _KEPT_ONCE for size, samples in self._samples.items()}
        for size in [size for size, seen in self._last_seen.items() if seen <= self._num_added - kept[size]]:
            del self._samples[size], self._last_seen[size]
            place = bisect.bisect_left(self._sizes, size)
            del self._sizes[place], self._values[place]


def _rising(values: list[float]) -> list[float]:
    """Return the largest values that never fall and are nowhere above these: each is the least from there on. Pure."""
    return list(itertools.accumulate(reversed(values), min))[::-1]


def _rounded(size: int) -> int:
    """Return the size under which a measurement is kept. Pure."""
    if size <= _EXACT:
        return size
    grain = 1 << (size.bit_length() - 5)
    return (size + grain // 2) // grain * grain
