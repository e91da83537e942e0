"""Runs the engine requests of one HTTP request, one for each prompt, and merges their outputs as they come.

Leaving the loop ends all of them, so a client that goes away, or one prompt that fails, frees every block.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.errors import EngineEndedError, InvalidRequestError
from trencadis.records import BeamSearchParams, FinishReason, RequestOutput, RequestTerms, SamplingParams
from trencadis_server.errors import SERVER_ERROR, ApiError
from trencadis_server.protocol.answers import Usage

if TYPE_CHECKING:
    from trencadis import AsyncLLM
    from trencadis_server.context import Admission

__all__ = ["Generation", "answer_id", "finished_outputs", "transfer_fields", "usage_of"]

_Indexed = tuple[int, RequestOutput]
_STARTED_AT_ONCE = 32
"""Prompts that are handed to the engine in one turn of the event loop, which takes one or two milliseconds."""
_LONG_PROMPTS = 1024
"""Number of tokens from which on computing the prompts costs far more than passing on intermediate outputs."""


def answer_id(prefix: str) -> str:
    """Return a new id of an answer, such as ``chatcmpl-...``."""
    return f"{prefix}-{uuid.uuid4().hex}"


@attrs.frozen(kw_only=True, eq=False)
class Generation:
    """The engine requests of one HTTP request.

    Attributes:
        llm: The engine.
        admission: Admission control.
        answer_id: Id of the answer; the ids of the engine requests begin with it.
        prompts: Token ids of each prompt, at least one prompt.
        params: Sampling parameters of all prompts.
        terms: Scheduling parameters, such as tenant and priority.
        caller: Name of the API key; empty if none is required.
        beams: Parameters of a beam search, which replaces ``params``; None: outputs are sampled.
        http_field: Returns the client's name of a sampling parameter, for errors.
    """

    llm: AsyncLLM
    admission: Admission
    answer_id: str
    prompts: Sequence[tuple[int, ...]]
    params: SamplingParams
    terms: RequestTerms
    caller: str = ""
    beams: BeamSearchParams | None = None
    http_field: Callable[[str], str] = str

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, self.prompts))

    async def outputs(
        self, *, streams: bool, on_output: Callable[[RequestOutput], bool] | None = None
    ) -> AsyncGenerator[_Indexed, None]:
        """Yield the index of a prompt and its newest output, as they come.

        Args:
            streams: Whether to yield every change; False: only finished outputs.
            on_output: Callback as for :meth:`trencadis.AsyncLLM.generate`; called only if there is one prompt with one
                choice.

        Raises:
            TooBusyError: A limit of the server is reached.
            RequestError: The engine refused a prompt.
            BackendError: The engine ended.
            ApiError: A prompt failed while it ran, or the engine refused a field of the request.
        """
        # The engine runs several sequences for a prompt, so a small request may ask for a great many.
        num_each = self.params.num_generated if self.beams is None else self.beams.beam_width
        num_requests = len(self.prompts) * num_each
        with (
            self._naming_the_http_field(),
            self.admission.hold(self.num_prompt_tokens, num_requests, caller=self.caller) as hold,
        ):
            one = self._one if self.beams is None else self._search
            if num_requests > 1:
                on_output = None  # a choice that failed is an output that must be looked at
            sources = [one(index, prompt, streams, on_output) for index, prompt in enumerate(self.prompts)]
            waiting = set(range(len(self.prompts)))
            async with aclosing(_merged(sources)) as merged:
                async for index, output in merged:
                    if waiting:
                        waiting.discard(index)
                        if not waiting:
                            hold.first_token()
                    _check(output)
                    yield index, output

    @contextmanager
    def _naming_the_http_field(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequestError as error:
            if not error.field:
                raise
            raise ApiError(error.http_status, str(error), param=self.http_field(error.field)) from error

    def _one(
        self,
        index: int,
        prompt: tuple[int, ...],
        streams: bool,
        on_output: Callable[[RequestOutput], bool] | None,
    ) -> AsyncIterator[RequestOutput]:
        return self.llm.generate(
            prompt,
            self.params,
            request_id=f"{self.answer_id}-{index}",
            streams=streams,
            on_output=on_output,
            terms=self._terms_of(index),
        )

    def _terms_of(self, index: int) -> RequestTerms:
        """Return the scheduling parameters of one prompt; only the first prompt keeps the transfer parameters."""
        is_first = index == 0 or self.terms.transfer_params is None
        return self.terms if is_first else attrs.evolve(self.terms, transfer_params=None)

    async def _search(self, index: int, prompt: tuple[int, ...], *_: object) -> AsyncIterator[RequestOutput]:
        """Yield the complete output of a beam search."""
        yield await self.llm.beam_search(prompt, self.beams, request_id=f"{self.answer_id}-{index}", terms=self.terms)


async def finished_outputs(generation: Generation) -> list[RequestOutput]:
    """Return the finished output of each prompt, in order.

    Intermediate outputs are requested only if the prompts are long, since they show when these no longer count as
    waiting.

    Raises:
        TrencadisError: An error of :meth:`Generation.outputs`.
        ApiError: An error of :meth:`Generation.outputs`.
    """
    async with aclosing(generation.outputs(streams=generation.num_prompt_tokens >= _LONG_PROMPTS)) as outputs:
        finished = {index: output async for index, output in outputs}
    return [finished[index] for index in sorted(finished)]


def usage_of(outputs: Collection[RequestOutput], *, counts_output: bool = True) -> Usage:
    """Return the usage of outputs, one for each prompt, including choices that ``best_of`` dropped. Pure; O(number of choices).

    Args:
        outputs: Newest output of each prompt.
        counts_output: Whether output tokens count; False: the output is not given to the client.
    """
    return Usage.of(
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        completion_tokens=sum(_num_generated(output) for output in outputs) if counts_output else 0,
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        approximate_tokens=sum(output.num_approximate_tokens for output in outputs),
    )


def transfer_fields(output: RequestOutput) -> dict[str, Any]:
    """Return the answer's transfer parameters, by which another engine finds the prompt's KV; empty if there are none. Pure."""
    return {} if output.transfer_params is None else {"kv_transfer_params": dict(output.transfer_params)}


def _num_generated(output: RequestOutput) -> int:
    return output.num_discarded_tokens + sum(len(one.token_ids) for one in output.outputs)


def _check(output: RequestOutput) -> None:
    """Raise if a completion failed or was aborted."""
    for one in output.outputs:
        if one.finish_reason is FinishReason.INVALID:
            raise InvalidRequestError(output.error)
        if one.finish_reason is FinishReason.ERROR:
            raise ApiError(500, f"The request failed while it ran: {output.error}", SERVER_ERROR, None, "engine_error")
        if one.finish_reason is FinishReason.ABORT:
            raise EngineEndedError("the request was ended before its output was complete.")


async def _merged(sources: Sequence[Any]) -> AsyncGenerator[_Indexed, None]:
    """Yield from all sources as they come; holds at most one output of each."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for output in source:
                yield 0, output
        return
    tasks: dict[asyncio.Task[RequestOutput | None], int] = {}
    try:
        for index, source in enumerate(sources):
            tasks[asyncio.create_task(_next(source))] = index
            if index % _STARTED_AT_ONCE == _STARTED_AT_ONCE - 1:
                await asyncio.sleep(0)  # other tasks of the event loop run in between
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # In the order of prompts, so that simultaneous outputs come in a fixed order.
            for task in sorted(done, key=tasks.__getitem__):
                index = tasks.pop(task)
                output = task.result()
                if output is not None:
                    tasks[asyncio.create_task(_next(sources[index]))] = index
                    yield index, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncIterator[RequestOutput]) -> RequestOutput | None:
    return await anext(source, None)
