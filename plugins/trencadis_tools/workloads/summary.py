"""Summary of a workload: counts, rate, lengths, and the share of prompts that an unlimited prefix cache could save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np

from trencadis_tools.workloads.workload import Workload, WorkloadRequest

__all__ = ["Spread", "Summary", "reusable_tokens", "summarise"]


@attrs.frozen(kw_only=True)
class Spread:
    """Mean, percentiles and maximum of a quantity over requests; NaN without requests."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@attrs.frozen(kw_only=True)
class Summary:
    """Summary of a workload.

    Attributes:
        name: Name of the workload.
        seed: Seed of the workload.
        num_requests: Number of requests.
        num_following: Number of requests that wait for the answer to another one.
        num_sessions: Number of sessions, including named ones of one request.
        span_s: Time from the first to the last arrival of requests that follow none, seconds.
        rate: Arrival rate of requests that follow none, requests per second; 0 if they arrive at once.
        gap_cv: Coefficient of variation of the gaps between those arrivals; 0 for fewer than three.
        prompt_tokens: Spread of prompt lengths, tokens.
        output_tokens: Spread of answer lengths, tokens.
        think_s: Spread of the waiting time of requests that follow another one, seconds.
        num_prompt_tokens: Prompt tokens of all requests.
        num_output_tokens: Output tokens of all requests.
        reusable_ratio: Share of prompt tokens that an unlimited prefix cache would have, in the order of the workload, 0 to 1.
        tenants: Number of requests by tenant.
        priorities: Number of requests by priority.
    """

    name: str
    seed: int
    num_requests: int
    num_following: int
    num_sessions: int
    span_s: float
    rate: float
    gap_cv: float
    prompt_tokens: Spread
    output_tokens: Spread
    think_s: Spread
    num_prompt_tokens: int
    num_output_tokens: int
    reusable_ratio: float
    tenants: dict[str, int]
    priorities: dict[int, int]


def summarise(workload: Workload) -> Summary:
    """Return the summary of a workload. Pure."""
    requests = workload.requests
    times = [one.arrival_s for one in requests if not one.after]
    gaps = np.diff(times)
    span_s = times[-1] - times[0]
    num_prompt_tokens = sum(one.num_prompt_tokens for one in requests)
    return Summary(
        name=workload.name,
        seed=workload.seed,
        num_requests=len(requests),
        num_following=len(requests) - len(times),
        num_sessions=len({one.session for one in requests if one.session}),
        span_s=span_s,
        rate=len(gaps) / span_s if span_s else 0.0,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and span_s else 0.0,
        prompt_tokens=_spread([one.num_prompt_tokens for one in requests]),
        output_tokens=_spread([one.num_output_tokens for one in requests]),
        think_s=_spread([one.think_s for one in requests if one.after]),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=sum(one.num_output_tokens for one in requests),
        reusable_ratio=sum(reusable_tokens(workload)) / num_prompt_tokens,
        tenants=dict(sorted(Counter(one.tenant for one in requests).items())),
        priorities=dict(sorted(Counter(one.priority for one in requests).items())),
    )


def reusable_tokens(workload: Workload) -> list[int]:
    """Return for each request the prompt tokens that an unlimited prefix cache would have, with blocks of one token. Pure.

    At least one token of a prompt is always computed, and the last token of an answer is never cached, since no step computes its KV.
    """
    by_id: dict[str, WorkloadRequest] = {one.request_id: one for one in workload.requests}
    seen: set[int] = set()
    reusable = []
    for one in workload.requests:
        if one.continues:
            before = by_id[one.after]
            found = before.num_prompt_tokens + before.num_output_tokens - 1
        else:
            fresh = next((place for place, block in enumerate(one.block_ids) if block not in seen), len(one.block_ids))
            found = fresh * workload.block_tokens
            seen.update(one.block_ids[fresh:])
        reusable.append(min(found, one.num_prompt_tokens - 1))
    return reusable


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(**dict.fromkeys(("mean", "p50", "p90", "p99", "max"), float("nan")))
    array = np.asarray(values, np.float64)
    p50, p90, p99 = (float(value) for value in np.percentile(array, [50, 90, 99]))
    return Spread(mean=float(array.mean()), p50=p50, p90=p90, p99=p99, max=float(array.max()))
