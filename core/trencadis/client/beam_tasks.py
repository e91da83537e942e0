"""Beam search by coroutines: the beams of a round are tasks that run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeAlias, TypeVar

from trencadis.client.beam_request import BeamRequest
from trencadis.client.prompts import Prompt
from trencadis.records import RequestOutput, SamplingParams

__all__ = ["Ask", "search_beams", "together"]

_T = TypeVar("_T")
Ask: TypeAlias = Callable[[Prompt, SamplingParams, str], Coroutine[Any, Any, RequestOutput]]
"""Continues a prompt under a request id, to its end."""


async def search_beams(search: BeamRequest, ask: Ask) -> RequestOutput:
    """Run a search to its end; cancelling it ends the requests that run for it.

    Args:
        search: New; its request id is the beginning of those of the beams.
        ask: Runs a request.

    Raises:
        TrencadisError: Whatever ``ask`` raises for a beam; the others have been ended.
    """
    num_rounds = 0
    while not search.is_finished:
        beams = enumerate(search.prompts())
        names = f"{search.request_id}/{num_rounds}"
        search.take(await together(ask(prompt, search.step_params, f"{names}/{beam}") for beam, prompt in beams))
        num_rounds += 1
    return search.output()


async def together(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines at once and return their results in order; if one fails, or the caller is cancelled, none goes on.

    Raises:
        BaseException: The first that one of them raised, as it was; the others have ended by then.
    """
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
