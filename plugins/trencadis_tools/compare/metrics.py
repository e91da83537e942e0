"""Metrics of a comparison: a mean or a quantile of a value that every request has, a ratio of two sums over requests, or a value of a whole run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import attrs
import numpy as np

from trencadis.errors import ConfigError, did_you_mean
from trencadis.records import FloatArray, Int64Array
from trencadis_tools.simulation import RequestRecord, Run

__all__ = ["DEFAULT_METRICS", "METRIC_FORMS", "Metric", "metric_of"]

DEFAULT_METRICS = "ttft_mean,ttft_p99,tpot_mean,e2e_mean"
METRIC_FORMS = "ttft, tpot or e2e with _mean, _p50, _p90, _p99 or another percentile; slo_attainment; prefix_hit_ratio (share of prompt tokens); output_throughput; preemptions"


def _within_targets(record: RequestRecord) -> float:
    request = record.request
    # With one token there is no time between tokens.
    return float(record.ttft_s <= request.ttft_target_s and not record.tpot_s > request.tpot_target_s)


_OF_REQUESTS: dict[str, Callable[[RequestRecord], float]] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
    "slo_attainment": _within_targets,
}
_RATIOS: dict[str, tuple[Callable[[RequestRecord], float], Callable[[RequestRecord], float]]] = {
    "prefix_hit_ratio": (lambda record: record.num_cached_tokens, lambda record: record.request.num_prompt_tokens),
}
_OF_RUNS: dict[str, Callable[[Run], float]] = {
    "output_throughput": lambda run: sum(record.num_output_tokens for record in run.records) / run.duration_s,
    "preemptions": lambda run: float(run.num_preemptions),
}
_LATENCIES = ("ttft", "tpot", "e2e")
_UNITS = {"output_throughput": "tokens/s", "preemptions": "", "slo_attainment": "", "prefix_hit_ratio": ""}
_LARGER_IS_BETTER = frozenset({"slo_attainment", "prefix_hit_ratio", "output_throughput"})


@attrs.frozen(kw_only=True)
class Metric:
    """One number of a run.

    Attributes:
        name: Such as ``ttft_p99``.
        quantity: ``ttft``, ``tpot``, ``e2e``, or the name itself.
        quantile: Of the requests' values, between 0 and 1; None: their mean, or a value of the run.
    """

    name: str
    quantity: str
    quantile: float | None = None

    @property
    def is_of_run(self) -> bool:
        """Whether the run has it and no request does: there is no interval then within one run."""
        return self.quantity in _OF_RUNS

    @property
    def is_latency(self) -> bool:
        """Whether it has no steady value in a run whose backlog grows."""
        return self.quantity in _LATENCIES or self.quantity == "slo_attainment"

    @property
    def larger_is_better(self) -> bool:
        """The direction of "better"."""
        return self.quantity in _LARGER_IS_BETTER

    @property
    def unit(self) -> str:
        """Of its value; empty for a ratio or a count."""
        return _UNITS.get(self.quantity, "s")

    def values(self, run: Run, kept: Int64Array | None = None) -> FloatArray:
        """Return the values of requests, in order of arrival, ``[num_kept]``; NaN where there is none. Pure.

        Of a ratio of two sums over requests, r = Σa / Σb, a request has r + (a - r b) / mean(b): the mean of these is r, and they spread
        as r does.

        Args:
            run: Of the requests.
            kept: Indices of those that count; None: all.

        Source: linearisation of the ratio estimator; Cochran 1977, Sampling Techniques, chapter 6.
        """
        records = run.records if kept is None else [run.records[index] for index in kept.tolist()]
        if self.quantity in _RATIOS:
            above, below = (np.array([one(record) for record in records], np.float64) for one in _RATIOS[self.quantity])
            ratio = above.sum() / below.sum()
            linearised: FloatArray = ratio + (above - ratio * below) / below.mean()
            return linearised
        value = _OF_REQUESTS[self.quantity]
        return np.array([value(record) for record in records], np.float64)

    def summary(self, values: FloatArray) -> float:
        """Return the mean or quantile of values of requests, leaving out NaN; NaN if none is left. Pure."""
        values = values[~np.isnan(values)]
        if not len(values):
            return math.nan
        return float(np.mean(values) if self.quantile is None else np.quantile(values, self.quantile))

    def of_run(self, run: Run) -> float:
        """Return the value of a whole run. Pure."""
        return _OF_RUNS[self.quantity](run)


def metric_of(name: str) -> Metric:
    """Return the metric of a name.

    Raises:
        ConfigError: There is none of that name.
    """
    if name in _OF_RUNS or name in _RATIOS or name == "slo_attainment":
        return Metric(name=name, quantity=name)
    quantity, _, statistic = name.partition("_")
    percentile = re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)", statistic)
    if quantity in _LATENCIES and (statistic == "mean" or (percentile and float(percentile[1]) > 0)):
        return Metric(name=name, quantity=quantity, quantile=float(percentile[1]) / 100 if percentile else None)
    known = [f"{quantity}_{statistic}" for quantity in _LATENCIES for statistic in ("mean", "p50", "p90", "p99")]
    known += ["slo_attainment", *_RATIOS, *_OF_RUNS]
    raise ConfigError(
        f'flag --metric: no such metric: "{name}".{did_you_mean(name, known)}', hint=f"There are: {METRIC_FORMS}."
    )
