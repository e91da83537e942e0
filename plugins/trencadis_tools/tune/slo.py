"""Service-level objectives, and how well a run keeps them.

ttft_p99=1s,itl_p99=100ms            a mean or percentile of all requests stays below a limit
ttft=1s,itl=100ms,goodput>=0.99      limits of each request, and the share of requests that must keep them
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.errors import ConfigError
from trencadis_tools.simulation import RequestRecord, Run
from trencadis_tools.simulation.run import token_gaps_s
from trencadis_tools.workloads import Workload

__all__ = ["FORM", "Limit", "Slo", "parse_slo"]

FORM = "ttft, itl, tpot or e2e with _mean, _p50, _p90, _p95 or _p99, = and a time in ms or s; goodput>=SHARE"

_TERM = re.compile(r"(ttft|tpot|itl|e2e)(?:_(mean|p50|p90|p95|p99))?<?=([0-9.]+)(ms|s)")
_GOODPUT = re.compile(r"goodput>?=([0-9.]+)")


@attrs.frozen(kw_only=True)
class Limit:
    """Limit of one latency.

    Attributes:
        quantity: Latency: ``ttft``, ``tpot``, ``itl`` or ``e2e``.
        statistic: ``mean`` or a percentile such as ``p99`` over requests; empty: limit of each request, for goodput.
        limit_s: Limit, seconds.
    """

    quantity: str
    statistic: str
    limit_s: float

    @property
    def name(self) -> str:
        """Name of the limit, such as ``itl_p99``."""
        return f"{self.quantity}_{self.statistic}" if self.statistic else self.quantity

    def seconds(self, record: RequestRecord) -> float:
        """Return the request's latency, seconds: infinite without an answer, NaN if one token has no time between tokens. Pure.

        For ``itl`` this is the longest time between two of its tokens.
        """
        if record.error:
            return math.inf
        if self.quantity == "itl":
            return record.max_itl_s
        return {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}[self.quantity]

    def value_s(self, run: Run) -> float:
        """Return the mean or percentile of a run, seconds; infinite if it includes requests without an answer. Pure.

        It is taken over requests; for ``itl`` over all times between tokens, where a request without an answer counts as one time.
        """
        if self.quantity == "itl":
            failed = sum(bool(record.error) for record in run.records)
            values = np.append(token_gaps_s(run.records), np.full(failed, math.inf))
        else:
            values = np.array([self.seconds(record) for record in run.records], np.float64)
        values = values[~np.isnan(values)]
        if not len(values):
            return 0.0
        if self.statistic == "mean":
            return float(values.mean())
        return float(np.quantile(values, int(self.statistic[1:]) / 100, method="inverted_cdf"))


@attrs.frozen(kw_only=True)
class Slo:
    """All objectives.

    Attributes:
        text: Objectives as text.
        limits: Limits of means, of percentiles and of single requests.
        goodput: Minimum share of requests that keep their own limits and those of the workload, 0 to 1; 0: none.
    """

    text: str
    limits: Sequence[Limit]
    goodput: float = 0.0

    @property
    def needs_token_times(self) -> bool:
        """Whether an objective needs the time of each token."""
        return any(limit.quantity == "itl" for limit in self.limits)

    def values(self, run: Run) -> dict[str, float]:
        """Return the value of each objective of a run: seconds, and the share ``goodput``. Pure."""
        found = {limit.name: limit.value_s(run) for limit in self.limits if limit.statistic}
        if self.goodput:
            found["goodput"] = self.goodput_of(run)
        return found

    def goodput_of(self, run: Run) -> float:
        """Return the share of requests that keep every limit of a single request. Pure."""
        return sum(self._keeps(record) for record in run.records) / len(run.records)

    def attainment(self, run: Run) -> float:
        """Return the share of requests that themselves stay below every limit, including those of means and percentiles. Pure."""
        return sum(self._keeps(record, every=True) for record in run.records) / len(run.records)

    def _keeps(self, record: RequestRecord, *, every: bool = False) -> bool:
        asked = record.request
        own = [(limit.seconds(record), limit.limit_s) for limit in self.limits if every or not limit.statistic]
        own += [(record.ttft_s, asked.ttft_target_s), (record.tpot_s, asked.tpot_target_s)] if self.goodput else []
        return not record.error and not any(value > most for value, most in own)

    def strain(self, run: Run) -> float:
        """Return the largest ratio of a value to its limit; up to 1 the run keeps all objectives. Pure."""
        ratios = [limit.value_s(run) / limit.limit_s for limit in self.limits if limit.statistic]
        if self.goodput:
            ratios.append((1 - self.goodput_of(run)) / (1 - self.goodput))
        return max(ratios)

    def check(self, workload: Workload) -> None:
        """Refuse objectives that do not apply to a workload.

        Raises:
            ConfigError: There is goodput without limits of single requests.
        """
        if not self.goodput or any(not limit.statistic for limit in self.limits):
            return
        if all(math.isinf(one.ttft_target_s) and math.isinf(one.tpot_target_s) for one in workload.requests):
            raise ConfigError(
                f'flag --slo: "{self.text}": goodput counts requests that keep their limits, and no request of the workload '
                f'"{workload.name}" has any.',
                hint="Give limits of each request: ttft=1s,itl=100ms,goodput>=0.99.",
            )


def parse_slo(text: str) -> Slo:
    """Parse objectives. Pure.

    Raises:
        ConfigError: The text has no objective, an unknown one, one twice, or none that bounds waiting.
    """
    limits: list[Limit] = []
    goodput = 0.0
    for term in (word.strip() for word in text.split(",")):
        found, share = _TERM.fullmatch(term), _GOODPUT.fullmatch(term)
        if share and not goodput:
            goodput = _number(share[1], text)
            if not 0 < goodput < 1:
                raise ConfigError(f'flag --slo: "{term}" is no share between 0 and 1.', hint="Write goodput>=0.99.")
            continue
        if not found or not (limit_s := _number(found[3], text) * (0.001 if found[4] == "ms" else 1.0)):
            raise ConfigError(f'flag --slo: "{term}" is no objective.', hint=f"There are: {FORM}.")
        limit = Limit(quantity=found[1], statistic=found[2] or "", limit_s=limit_s)
        if limit.name in [one.name for one in limits]:
            raise ConfigError(f'flag --slo: "{text}" limits {limit.name} twice.', hint="Leave one out.")
        limits.append(limit)
    slo = Slo(text=text, limits=tuple(limits), goodput=goodput)
    _check_whole(slo)
    return slo


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f'flag --slo: "{text}" in "{whole}" is no number.', hint=f"There are: {FORM}.") from None


def _check_whole(slo: Slo) -> None:
    single = [limit.name for limit in slo.limits if not limit.statistic]
    if single and not slo.goodput:
        raise ConfigError(
            f'flag --slo: "{slo.text}" limits {single[0]} of each request, and does not say of how many requests.',
            hint=f"Add goodput>=0.99, or name a percentile: {single[0]}_p99.",
        )
    if not slo.goodput and all(limit.quantity in ("tpot", "itl") for limit in slo.limits):
        raise ConfigError(
            f'flag --slo: "{slo.text}" says nothing of how long requests wait, so that any rate keeps it.',
            hint="Add a limit of ttft or e2e: ttft_p99=1s.",
        )
