"""Tenants, priorities and shared prefixes, drawn for requests that have none.

Draws apply to the whole session of a request. Functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
from attrs.validators import deep_iterable, ge, gt

from trencadis.records import Int64Array
from trencadis_tools.workloads.draws import Stream, categories, uniforms, zipf_shares
from trencadis_tools.workloads.workload import WorkloadRequest

__all__ = [
    "Prefixes",
    "Priorities",
    "Targets",
    "Tenants",
    "with_prefixes",
    "with_priorities",
    "with_targets",
    "with_tenants",
]


@attrs.frozen(kw_only=True)
class Tenants:
    """Table ``[tenants]``: tenants, drawn once for each session or single request.

    Attributes:
        num: Number of tenants, named "0", "1" …; 0: those of the trace.
        exponent: Zipf exponent: the share of tenant k is in proportion to ``(k + 1) ** -exponent``.
    """

    num: int = attrs.field(default=0, validator=ge(0))
    exponent: float = attrs.field(default=1.0, validator=ge(0))


@attrs.frozen(kw_only=True)
class Priorities:
    """Table ``[priorities]``: priorities, drawn once for each session or single request.

    Attributes:
        shares: Relative shares of priority 0 (most urgent), 1, and so on; empty: priorities of the trace.
    """

    shares: tuple[float, ...] = attrs.field(default=(), validator=deep_iterable(gt(0)))


@attrs.frozen(kw_only=True)
class Targets:
    """Table ``[targets]``: latency targets of requests without their own.

    Attributes:
        ttft_s: Target of the time to first token, seconds; infinity: none.
        tpot_s: Target of the time per output token, seconds; infinity: none.
    """

    ttft_s: float = attrs.field(default=math.inf, validator=gt(0))
    tpot_s: float = attrs.field(default=math.inf, validator=gt(0))


@attrs.frozen(kw_only=True)
class Prefixes:
    """Table ``[prefixes]``: prefixes shared by prompts of a tenant, such as system prompts.

    Attributes:
        tokens: Length of each prefix, tokens, included in the prompt's length; a shorter prompt is the beginning of a prefix. 0: no
            prefixes.
        num: Number of different prefixes of each tenant, drawn once for each session or single request.
        exponent: Zipf exponent: the share of prefix k is in proportion to ``(k + 1) ** -exponent``.
    """

    tokens: int = attrs.field(default=0, validator=ge(0))
    num: int = attrs.field(default=1, validator=ge(1))
    exponent: float = attrs.field(default=1.0, validator=ge(0))


def with_tenants(requests: Sequence[WorkloadRequest], tenants: Tenants, *, seed: int) -> list[WorkloadRequest]:
    """Return the requests with a tenant drawn for each."""
    drawn = uniforms(seed, Stream.TENANTS, _groups(requests))
    found = categories(drawn, zipf_shares(tenants.num, tenants.exponent)).tolist()
    return [attrs.evolve(one, tenant=str(tenant)) for one, tenant in zip(requests, found, strict=True)]


def with_priorities(requests: Sequence[WorkloadRequest], priorities: Priorities, *, seed: int) -> list[WorkloadRequest]:
    """Return the requests with a priority drawn for each."""
    found = categories(uniforms(seed, Stream.PRIORITIES, _groups(requests)), priorities.shares).tolist()
    return [attrs.evolve(one, priority=priority) for one, priority in zip(requests, found, strict=True)]


def with_targets(requests: Sequence[WorkloadRequest], targets: Targets) -> list[WorkloadRequest]:
    """Return the requests with these targets in place of missing ones."""
    return [
        attrs.evolve(
            one,
            ttft_target_s=targets.ttft_s if one.ttft_target_s == math.inf else one.ttft_target_s,
            tpot_target_s=targets.tpot_s if one.tpot_target_s == math.inf else one.tpot_target_s,
        )
        for one in requests
    ]


def with_prefixes(requests: Sequence[WorkloadRequest], prefixes: Prefixes, *, seed: int) -> list[WorkloadRequest]:
    """Return the requests, which have no blocks, with one block id for their prefix, of the prefix's length."""
    drawn = uniforms(seed, Stream.PREFIXES, _groups(requests))
    ranks = categories(drawn, zipf_shares(prefixes.num, prefixes.exponent)).tolist()
    tenants: dict[str, int] = {}
    made = []
    for one, rank in zip(requests, ranks, strict=True):
        tenant = tenants.setdefault(one.tenant, len(tenants))
        made.append(one if one.continues else attrs.evolve(one, block_ids=(tenant * prefixes.num + rank,)))
    return made


def _groups(requests: Sequence[WorkloadRequest]) -> Int64Array:
    """Return a number for each request, equal for requests of one session."""
    first: dict[str, int] = {}
    return np.array(
        [first.setdefault(one.session, index) if one.session else index for index, one in enumerate(requests)], np.int64
    )
