"""Step time as a function of the number of tokens, learned from running steps."""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np
import numpy.typing as npt

from trencadis.records import Int64Array

__all__ = ["TimeCurve"]

_NUM_SAMPLES = 5
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

    At a size that was measured lately: the lower median of the last five, so that one slow step says nothing; the first
    measurement of all is left out, for what runs then runs for the first time. Where a larger size was quicker, both get their mean:
    more is never done in less time, so what says so is noise, and whoever believes it drafts in vain.
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
        self._medians: list[float] = []
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
            self._medians.insert(place, seconds)
        samples.append(seconds)
        self._last_seen[size] = self._num_added
        self._medians[bisect.bisect_left(self._sizes, size)] = sorted(samples)[(len(samples) - 1) // 2]
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
        first, last, base = self._sizes[0], self._sizes[-1], self._base
        medians = _rising(self._medians)
        fastest, slowest = medians[0], medians[-1]
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
        sizes, ends = zip(*beyond, strict=True)
        return np.array([zero, *self._sizes, *sizes], np.float64), np.array([low, *medians, *ends])

    def _forget(self) -> None:
        kept = {size: _KEPT if len(samples) > 1 else _KEPT_ONCE for size, samples in self._samples.items()}
        for size in [size for size, seen in self._last_seen.items() if seen <= self._num_added - kept[size]]:
            del self._samples[size], self._last_seen[size]
            place = bisect.bisect_left(self._sizes, size)
            del self._sizes[place], self._medians[place]


def _rising(values: list[float]) -> list[float]:
    """Return the values next to these, by squares, that never fall: neighbours out of order get their mean. Pure.

    Source: pool adjacent violators (Ayer et al., Annals of Mathematical Statistics 26, 1955).
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _rounded(size: int) -> int:
    """Return the size under which a measurement is kept. Pure."""
    if size <= _EXACT:
        return size
    grain = 1 << (size.bit_length() - 5)
    return (size + grain // 2) // grain * grain
