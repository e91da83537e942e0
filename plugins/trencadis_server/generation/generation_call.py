"""Common part of chat and text completions: validate a request, run it, and answer it whole or as a stream."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trencadis.records import BeamSearchParams, RequestOutput, RequestTerms, SamplingParams
from trencadis_server.context import context_of
from trencadis_server.errors import ApiError
from trencadis_server.generation.connection import DirectWrites, answer_while_connected, direct_writes
from trencadis_server.generation.generation import Generation, answer_id, finished_outputs
from trencadis_server.generation.sampling import http_field
from trencadis_server.generation.sse import EventStream, check_stream_options
from trencadis_server.protocol.json_body import json_response
from trencadis_server.routes.models import check_generates, check_model

if TYPE_CHECKING:
    from trencadis import AsyncLLM
    from trencadis_server.context import ServerContext
    from trencadis_server.protocol.generation import GenerationRequest

__all__ = ["GenerationCall", "StreamWriter", "open_call", "terms_of"]

_BYTES_PER_CHARACTER = 8
"""Bytes of a body that are validated in the time in which a character is encoded."""
_CHARACTERS_PER_WORD = 200
"""Characters that are encoded in the time that a banned word takes, which is encoded twice by itself."""


def terms_of(caller: str, body: GenerationRequest, *, allows_weight: bool) -> RequestTerms:
    """Return the scheduling parameters of a request. Pure.

    Cached prefixes are shared neither between API keys nor between users of one key, since the time to the first token
    would tell whether another has sent the same prompt. Requests of one key with the same ``cache_salt`` share them
    instead. Users within a key share its weight, which only the operator can raise.

    Args:
        caller: Name of the API key; empty if none is required.
        body: Request body.
        allows_weight: Whether clients may set ``weight``.

    Raises:
        ApiError: The request sets a weight, and may not.
    """
    if body.weight is not None and not allows_weight:
        raise ApiError(
            400,
            "weight is set by this server's operator, in [scheduling.tenants]; clients may not (server.client_weights). "
            "Leave it out.",
            param="weight",
            code="unsupported_parameter",
        )
    return RequestTerms(
        priority=body.priority or 0,
        tenant=f"{caller}/{body.user}" if body.user else caller,
        cache_salt=_salt(caller, body),
        weight=body.weight,
        ttft_target_s=_seconds(body.ttft_target_ms),
        tpot_target_s=_seconds(body.tpot_target_ms),
        transfer_params=body.kv_transfer_params,
    )


def _salt(caller: str, body: GenerationRequest) -> str:
    if body.cache_salt:
        return f"{caller}\0{body.cache_salt}"
    return f"{caller}\0\0{body.user}" if body.user else caller


def _seconds(target_ms: float | None) -> float:
    return math.inf if target_ms is None else target_ms / 1e3


class StreamWriter(Protocol):
    """Writes the events of an answer."""

    def stream(
        self,
        generation: Generation,
        *,
        includes_usage: bool,
        is_continuous: bool,
        direct: DirectWrites | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield events; see :class:`trencadis_server.generation.chat_writer.ChatWriter`."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class GenerationCall:
    """A validated request to chat or text completions.

    Attributes:
        request: The HTTP request.
        body: Validated request body.
        context: Context of the server.
        llm: The current engine.
        model: Model name that the client asked for.
        param: Field that holds the prompt, for errors.
        created: Creation time, seconds since 1970.
        includes_usage: Whether the last chunk has the usage.
        is_continuous: Whether every chunk has the usage.
    """

    request: Request
    body: GenerationRequest
    context: ServerContext
    llm: AsyncLLM
    model: str
    param: str
    created: int
    includes_usage: bool
    is_continuous: bool

    @property
    def caller(self) -> str:
        """Name of the API key; empty if none is required."""
        caller: str = self.request.state.caller
        return caller

    async def params(self, make: Callable[[], SamplingParams]) -> SamplingParams:
        """Return the result of ``make``; on a thread if the request has long lists.

        Raises:
            ApiError: An error of ``make``.
            InvalidRequestError: An error of ``make``.
        """
        num_bytes = len(await self.request.body())
        num_words = len(self.body.bad_words or ())
        weight = num_bytes // _BYTES_PER_CHARACTER + num_words * _CHARACTERS_PER_WORD
        return await self.context.encoder.run(make, num_characters=weight, caller=self.caller)

    def generation(
        self,
        prefix: str,
        *,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        beams: BeamSearchParams | None = None,
    ) -> Generation:
        """Return the engine requests to run.

        Args:
            prefix: Prefix of the answer's id, such as ``cmpl``.
            prompts: Token ids of each prompt, at least one prompt.
            params: Sampling parameters of all prompts.
            beams: Parameters of a beam search, which replaces ``params``; None: outputs are sampled.

        Raises:
            ApiError: The client sets scheduling parameters that it may not set.
        """
        allows_weight = self.context.config.client_weights
        return Generation(
            llm=self.llm,
            admission=self.context.admission,
            answer_id=answer_id(prefix),
            prompts=prompts,
            params=params,
            beams=beams,
            http_field=functools.partial(http_field, self.body),
            caller=self.caller,
            terms=terms_of(self.caller, self.body, allows_weight=allows_weight),
        )

    async def answer(
        self, generation: Generation, writer: StreamWriter, whole: Callable[[list[RequestOutput]], msgspec.Struct]
    ) -> Response:
        """Run a generation and return the answer, whole or as a stream.

        Args:
            generation: Engine requests to run.
            writer: Writes a stream.
            whole: Makes the answer in one piece from the finished output of each prompt.

        Raises:
            TrencadisError: An error of :meth:`Generation.outputs`, if nothing was sent yet; also ``ApiError``.
        """
        if self.body.stream:
            events = writer.stream(
                generation,
                includes_usage=self.includes_usage,
                is_continuous=self.is_continuous,
                direct=direct_writes(self.request.scope),
            )
            return EventStream(events, param=self.param, request_id=self.request.state.request_id)

        async def run() -> Response:
            outputs = await finished_outputs(generation)
            weight = sum(map(_num_candidates, outputs))
            return await self.context.writer.run(
                lambda: json_response(whole(outputs)), num_characters=weight, caller=self.caller
            )

        return await answer_while_connected(self.request, run())


def open_call(request: Request, body: GenerationRequest, *, param: str) -> GenerationCall:
    """Validate a request and return its call.

    Args:
        request: The HTTP request.
        body: Request body.
        param: Field that holds the prompt, for errors.

    Raises:
        ApiError: The model does not exist or does not generate, or the stream options contradict each other.
        EngineEndedError: No engine serves now.
    """
    context = context_of(request)
    llm = context.ready_llm
    model = check_model(context, body.model)
    check_generates(llm)
    includes_usage, is_continuous = check_stream_options(body)
    return GenerationCall(
        request=request,
        body=body,
        context=context,
        llm=llm,
        model=model,
        param=param,
        created=int(time.time()),
        includes_usage=includes_usage,
        is_continuous=is_continuous,
    )


def _num_candidates(output: RequestOutput) -> int:
    """Return the number of log-probabilities of an output, as a measure of encoding time. Pure."""
    lists = [output.prompt_logprobs or (), *(one.logprobs or () for one in output.outputs)]
    return sum(len(entries) * (1 + len(entries[-1].top_token_ids)) for entries in lists if entries)
