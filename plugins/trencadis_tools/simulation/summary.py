"""A run in numbers: latencies, throughput, prefix hits, and how evenly replicas were loaded."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from trencadis.errors import ConfigError
from trencadis_tools.compare.steady_state import backlog_of
from trencadis_tools.simulated_store.store import KVTraffic
from trencadis_tools.simulation.run import Run

__all__ = ["Percentiles", "RunSummary", "summary_of"]


@attrs.frozen(kw_only=True)
class Percentiles:
    """Percentiles of some latencies, seconds; 0 of none."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@attrs.frozen(kw_only=True)
class RunSummary:
    """A run in numbers.

    Attributes:
        num_replicas: Engines.
        num_requests: Number of requests of the workload.
        num_answered: Number of requests that were answered.
        duration_s: From the start to the last token.
        request_rate: Answers a second.
        output_rate: Output tokens a second.
        prompt_rate: Prompt tokens a second, of answered requests.
        ttft_s: From sent to the first token.
        tpot_s: From token to token, of answers with several.
        e2e_s: From sent to the last token.
        goodput: Answers a second that kept their targets.
        prefix_hit_ratio: Share of prompt tokens taken from prefix caches.
        busy_ratio: Share of the time that replicas computed, their mean.
        busy_imbalance: The busiest replica's time by the mean; 1 is even.
        request_imbalance: The same of requests.
        num_preemptions: Number of preemptions of all engines.
        recompute_ratio: Tokens computed a second time by tokens computed.
        num_moved: Times that a request left a replica that failed.
        num_draft_tokens: Drafts that were verified.
        num_accepted_tokens: Number of drafts that became part of an answer.
        num_rebalanced: Times that the router moved one from a replica that served.
        is_saturated: Whether more requests came than were answered, so that latencies depend on the length of the run; None: scipy,
            which tells, is not installed.
        num_steps: Number of steps of all engines.
        num_skipped_steps: Number of steps that were computed at once with the one before.
        kv: Traffic to and from KV stores; None: there were none.
        kv_link_ratio: Share of the time that links to stores passed bytes on, their mean.
    """

    num_replicas: int
    num_requests: int
    num_answered: int
    duration_s: float
    request_rate: float
    output_rate: float
    prompt_rate: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    goodput: float
    prefix_hit_ratio: float
    busy_ratio: float
    busy_imbalance: float
    request_imbalance: float
    num_preemptions: int
    recompute_ratio: float
    num_moved: int
    num_rebalanced: int
    is_saturated: bool | None
    num_steps: int
    num_skipped_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    kv: KVTraffic | None
    kv_link_ratio: float


def summary_of(run: Run) -> RunSummary:
    """Return the numbers of a run. Pure."""
    answered = [record for record in run.records if not record.error]
    duration_s = run.duration_s or 1.0
    busy_s = np.array(run.busy_s)
    num_served = np.bincount([record.replica for record in answered], minlength=len(busy_s))
    good = sum(
        record.ttft_s <= record.request.ttft_target_s and not record.tpot_s > record.request.tpot_target_s
        for record in answered
    )
    return RunSummary(
        num_replicas=len(run.busy_s),
        num_requests=len(run.records),
        num_answered=len(answered),
        duration_s=run.duration_s,
        request_rate=len(answered) / duration_s,
        output_rate=sum(record.num_output_tokens for record in answered) / duration_s,
        prompt_rate=sum(record.request.num_prompt_tokens for record in answered) / duration_s,
        ttft_s=_percentiles(record.ttft_s for record in answered),
        tpot_s=_percentiles(record.tpot_s for record in answered if record.num_output_tokens > 1),
        e2e_s=_percentiles(record.e2e_s for record in answered),
        goodput=good / duration_s,
        prefix_hit_ratio=run.num_prompt_tokens_cached / max(1, run.num_prompt_tokens_admitted),
        busy_ratio=float(busy_s.mean() / duration_s),
        busy_imbalance=float(busy_s.max() / busy_s.mean()) if busy_s.any() else 1.0,
        request_imbalance=float(num_served.max() / num_served.mean()) if num_served.any() else 1.0,
        num_preemptions=run.num_preemptions,
        recompute_ratio=run.num_recomputed_tokens / max(1, run.num_scheduled_tokens),
        num_moved=run.num_moved,
        num_rebalanced=run.num_rebalanced,
        is_saturated=_is_saturated(run),
        num_steps=run.num_steps,
        num_skipped_steps=max(0, run.num_steps - run.num_plans),
        num_draft_tokens=run.num_draft_tokens,
        num_accepted_tokens=run.num_accepted_tokens,
        kv=run.kv,
        kv_link_ratio=0.0 if run.kv is None else run.kv.link_busy_s / (duration_s * len(busy_s)),
    )


def _percentiles(values: Iterable[float]) -> Percentiles:
    array = np.fromiter(values, np.float64)
    if not array.size:
        return Percentiles()
    p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
    return Percentiles(mean=float(array.mean()), p50=p50, p90=p90, p99=p99)


def _is_saturated(run: Run) -> bool | None:
    answered = [record for record in run.records if not record.error]
    try:
        backlog = backlog_of(
            np.array([record.sent_s for record in answered]), np.array([record.finished_s for record in answered])
        )
    except ConfigError:
        return None
    return bool(backlog.is_growing)
