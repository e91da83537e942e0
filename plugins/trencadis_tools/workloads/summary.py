"""What a workload is in numbers: counts, rate, lengths, and how much of its prompts a prefix cache could save at best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np

from trencadis_tools.workloads.workload import Workload, WorkloadRequest

__all__ = ["Spread", "Summary", "reusable_tokens", "summarise"]


@attrs.frozen(kw_only=True)
class Spread:
    """Of a quantity over requests; NaN where there are none."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@attrs.frozen(kw_only=True)
class Summary:
    """A workload in numbers.

    Attributes:
        name: Of the workload.
        seed: That it was drawn from.
        num_requests: All.
        num_following: Of these, those that wait for the answer to another one.
        num_sessions: Sessions, those of one request included where they have a name.
        span_s: From the first to the last time of those that wait for none.
        rate: Of those, requests a second; 0 if they come at once.
        gap_cv: Standard deviation of gaps between those, by their mean; 0 for fewer than three.
        prompt_tokens: Of a request.
        output_tokens: Of a request.
        think_s: Of requests that wait for another.
        num_prompt_tokens: All together.
        num_output_tokens: All together.
        reusable_ratio: Share of prompt tokens that an unlimited prefix cache would have when they come, in the order of the workload.
        tenants: Requests of each.
        priorities: Requests of each.
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
    """Return the workload in numbers. Pure."""
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

    At least one token of a prompt is always computed, and the last token of an answer is never in a cache: no step read it.
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
