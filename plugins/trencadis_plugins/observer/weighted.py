"""A histogram that takes a value many times at once: the gaps between the tokens of a long answer are one call."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily

__all__ = ["WeightedHistogram"]


class WeightedHistogram:
    """Counts values by the smallest bound they do not exceed.

    Args:
        name: Name of the metric.
        text: Help text of the metric.
        registry: Where it is.
        buckets: Upper bounds, ascending; infinity is added.
    """

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value ``weight`` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric."""
        family = HistogramMetricFamily(self._name, self._text)
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((_written(bound), total))
        family.add_metric([], buckets, sum_value=self._sum)
        yield family


def _written(bound: float) -> str:
    """Return a bound as the label ``le`` has it. Pure."""
    return "+Inf" if bound == float("inf") else str(float(bound))
