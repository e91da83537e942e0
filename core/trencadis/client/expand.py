"""One request for several completions becomes as many requests for one."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import attrs

from trencadis.records import Request, SamplingParams

__all__ = ["expand"]

_NUM_SEEDS = 2**63
_T = TypeVar("_T")


def expand(request: Request) -> tuple[Request, ...]:
    """Return the requests that the engine runs for ``request``, by completion index: ``best_of`` of them, or ``n``. Pure.

    They are named ``id/0``, ``id/1`` ... and share the prompt's KV through the prefix cache. With a seed, completion i draws with
    ``seed + i`` (modulo 2**63), so the first equals what ``n = 1`` gives; without one, each draws from its own name. Log-probabilities
    of the prompt are computed once, by the first, which alone has the transfer parameters: one prefix is handed over once. Where ``best_of`` is to choose, each token's log-probability is reported.
    """
    params = request.params
    if params.num_generated == 1:
        return (request,)
    first = attrs.evolve(
        params, n=1, best_of=None, logprobs=0 if params.logprobs is None and params.is_chosen else params.logprobs
    )
    other = first if first.prompt_logprobs is None else attrs.evolve(first, prompt_logprobs=None)
    rest = request if request.transfer_params is None else attrs.evolve(request, transfer_params=None)
    return tuple(
        _changed(
            rest if index else request,
            request_id=f"{request.request_id}/{index}",
            params=_seeded(other if index else first, index),
        )
        for index in range(params.num_generated)
    )


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None else _changed(params, seed=(params.seed + index) % _NUM_SEEDS)


def _changed(record: _T, **changes: Any) -> _T:
    """Return a copy of a frozen record with other values, which are sound: the others, which may be long, are not checked again."""
    changed = copy.copy(record)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed
