"""One request for several completions becomes as many requests for one."""

from __future__ import annotations

import attrs

from trencadis.records import Request

__all__ = ["expand"]

_NUM_SEEDS = 2**63


def expand(request: Request) -> tuple[Request, ...]:
    """Return the requests that the engine runs for ``request``, by completion index: ``best_of`` of them, or ``n``. Pure.

    They are named ``id/0``, ``id/1`` ... and share the prompt's KV through the prefix cache. With a seed, completion i draws with
    ``seed + i`` (modulo 2**63), so the first equals what ``n = 1`` gives; without one, each draws from its own name. Log-probabilities
    of the prompt are computed once, by the first, which alone has the transfer parameters: one prefix is handed over once. Where ``best_of`` is to choose, each token's log-probability is reported.
    """
    params = request.params
    if params.num_generated == 1:
        return (request,)
    logprobs = 0 if params.logprobs is None and params.is_chosen else params.logprobs
    return tuple(
        attrs.evolve(
            request,
            request_id=f"{request.request_id}/{index}",
            transfer_params=request.transfer_params if index == 0 else None,
            params=attrs.evolve(
                params,
                n=1,
                best_of=None,
                seed=None if params.seed is None else (params.seed + index) % _NUM_SEEDS,
                logprobs=logprobs,
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
        )
        for index in range(params.num_generated)
    )
