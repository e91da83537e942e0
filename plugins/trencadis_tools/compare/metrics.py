"""Metrics of a comparison: a mean or quantile over requests, a ratio of two sums over requests, or a value of a whole run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from trencadis.errors import ConfigError, did_you_mean
from trencadis.records import FloatArray, Int64Array
from trencadis_tools.simulation import RequestRecord, Run
from trencadis_tools.simulation.qoe import qoe_of, qoe_v1_of
from trencadis_tools.simulation.run import token_gaps_s

__all__ = ["DEFAULT_METRICS", "METRIC_FORMS", "Metric", "metric_of"]

DEFAULT_METRICS = "ttft_mean,ttft_p99,tpot_mean,e2e_mean"
METRIC_FORMS = (
    "ttft, tpot, e2e, max_itl, qoe or qoe_v1 with _mean, _p50, _p90, _p99 or another percentile; itl, of all times between tokens, with the "
    "same; qoe_above_0.9 or another share; slo_attainment; prefix_hit_ratio (share of prompt tokens); output_throughput; preemptions"
)


def _within_targets(record: RequestRecord) -> float:
    request = record.request
    # With one token there is no time between tokens.
    return float(record.ttft_s <= request.ttft_target_s and not record.tpot_s > request.tpot_target_s)


_OF_REQUESTS: dict[str, Callable[[RequestRecord], float]] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
    "max_itl": lambda record: record.max_itl_s,
    "qoe": qoe_of,
    "qoe_v1": qoe_v1_of,
    "slo_attainment": _within_targets,
}
_RATIOS: dict[str, tuple[Callable[[RequestRecord], float], Callable[[RequestRecord], float]]] = {
    "prefix_hit_ratio": (lambda record: record.num_cached_tokens, lambda record: record.request.num_prompt_tokens),
}
_OF_RUNS: dict[str, Callable[[Run], float]] = {
    "output_throughput": lambda run: sum(record.num_output_tokens for record in run.records) / run.duration_s,
    "preemptions": lambda run: float(run.num_preemptions),
}
_LATENCIES = ("ttft", "tpot", "e2e", "itl", "max_itl")
_QOE = ("qoe", "qoe_v1")
_SHARES = ("slo_attainment", "prefix_hit_ratio", *_QOE)
_UNITS = {"output_throughput": "tokens/s", "preemptions": "", **dict.fromkeys(_SHARES, "")}
_LARGER_IS_BETTER = frozenset({"output_throughput", *_SHARES})
_STATISTIC = re.compile(r"mean|p(\d{1,2}(?:\.\d+)?)|above_(0?\.\d+)")


@attrs.frozen(kw_only=True)
class Metric:
    """Metric that gives one number for a run.

    Attributes:
        name: Name, such as ``ttft_p99``.
        quantity: Quantity, such as ``ttft``, or ``name`` itself.
        quantile: Quantile of the requests' values, 0 to 1; None: their mean, or a value of the run.
        above: Threshold: each value is replaced by whether it reaches the threshold; None: the value itself.
    """

    name: str
    quantity: str
    quantile: float | None = None
    above: float | None = None

    @property
    def is_of_run(self) -> bool:
        """Whether the metric belongs to the run and not to requests, so that one run gives no interval."""
        return self.quantity in _OF_RUNS or self.quantity == "itl"

    @property
    def needs_token_times(self) -> bool:
        """Whether records must have the time of each token."""
        return self.quantity in ("itl", "max_itl", *_QOE)

    @property
    def is_latency(self) -> bool:
        """Whether the metric has no steady value while the backlog grows."""
        return self.quantity in (*_LATENCIES, "slo_attainment", *_QOE)

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger value is better."""
        return self.quantity in _LARGER_IS_BETTER

    @property
    def unit(self) -> str:
        """Unit of the value; empty for a ratio or a count."""
        return _UNITS.get(self.quantity, "s")

    def values(self, run: Run, kept: Int64Array | None = None) -> FloatArray:
        """Return the values of requests, in order of arrival, ``[num_kept]``; NaN where there is none. Pure.

        For a ratio of two sums over requests, r = Σa / Σb, the value of a request is r + (a - r b) / mean(b): the mean of these
        values is r, and their variance gives that of r.

        Args:
            run: Run with the requests.
            kept: Indices of the requests that count, int64; None: all.

        Source: linearisation of the ratio estimator; Cochran 1977, Sampling Techniques, chapter 6.
        """
        records = run.records if kept is None else [run.records[index] for index in kept.tolist()]
        if self.quantity in _RATIOS:
            above, below = (np.array([one(record) for record in records], np.float64) for one in _RATIOS[self.quantity])
            ratio = above.sum() / below.sum()
            linearised: FloatArray = ratio + (above - ratio * below) / below.mean()
            return linearised
        value = _OF_REQUESTS[self.quantity]
        found: FloatArray = np.array([value(record) for record in records], np.float64)
        return found if self.above is None else np.where(np.isnan(found), math.nan, found >= self.above)

    def summary(self, values: FloatArray) -> float:
        """Return the mean or quantile of values of requests, leaving out NaN; NaN if none is left. Pure."""
        values = values[~np.isnan(values)]
        if not len(values):
            return math.nan
        return float(np.mean(values) if self.quantile is None else np.quantile(values, self.quantile))

    def of_run(self, run: Run, counting: Sequence[int] | Int64Array | None = None) -> float:
        """Return the value of a whole run. Pure.

        Args:
            run: Run to summarise.
            counting: Indices of requests whose inter-token times count; None: all.
        """
        if self.quantity != "itl":
            return _OF_RUNS[self.quantity](run)
        places = range(len(run.records)) if counting is None else counting
        return self.summary(token_gaps_s(run.records[place] for place in places))


def metric_of(name: str) -> Metric:
    """Return the metric of a name.

    Raises:
        ConfigError: There is no metric of that name.
    """
    if name in _OF_RUNS or name in _RATIOS or name == "slo_attainment":
        return Metric(name=name, quantity=name)
    for quantity in (*_LATENCIES, *_QOE):
        found = _STATISTIC.fullmatch(name.removeprefix(f"{quantity}_"))
        if not name.startswith(f"{quantity}_") or not found or (found[1] and not float(found[1])):
            continue
        if not found[2]:
            return Metric(name=name, quantity=quantity, quantile=float(found[1]) / 100 if found[1] else None)
        if quantity in _QOE:
            return Metric(name=name, quantity=quantity, above=float(found[2]))
    known = [f"{quantity}_{word}" for quantity in (*_LATENCIES, *_QOE) for word in ("mean", "p50", "p90", "p99")]
    known += ["qoe_above_0.9", "slo_attainment", *_RATIOS, *_OF_RUNS]
    raise ConfigError(
        f'flag --metric: no such metric: "{name}".{did_you_mean(name, known)}', hint=f"There are: {METRIC_FORMS}."
    )
