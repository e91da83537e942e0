"""Server-sent events: streaming response, chunks whose constant part is encoded once, and the unsent part of a completion."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trencadis.records import CompletionOutput, FinishReason, TokenLogprobs
from trencadis_server.errors import ApiError, as_api_error
from trencadis_server.generation.connection import while_connected
from trencadis_server.protocol.answers import Usage

if TYPE_CHECKING:
    from trencadis_server.protocol.generation import GenerationRequest

__all__ = ["DONE", "ChunkEncoder", "EventStream", "Progress", "check_stream_options", "event", "finish_name"]

logger = logging.getLogger("trencadis")

DONE = b"data: [DONE]\n\n"
_EMPTY = b'"choices":[]'
_ChoiceT = TypeVar("_ChoiceT")


def event(data: bytes) -> bytes:
    """Return an event with one line of data. Pure."""
    return b"data: " + data + b"\n\n"


def check_stream_options(body: GenerationRequest) -> tuple[bool, bool]:
    """Return whether the last chunk has the usage, and whether every chunk has it. Pure.

    Raises:
        ApiError: Options are given without ``stream``, or a field that only whole answers have is set.
    """
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs is not in streams. Leave out stream.", param="prompt_logprobs")
    if options is None:
        return False, False
    includes = bool(options.include_usage)
    return includes, includes and bool(options.continuous_usage_stats)


class EventStream(Response):
    """Streams events until the client disconnects.

    Nothing is sent before the first event: an earlier error is answered with its own status, a later one becomes an
    event with ``error``. When the client leaves, the generator is closed.

    Args:
        events: Encoded events, without the one that ends the stream.
        param: Field that held the prompt, for errors.
        request_id: Id of the request, for the log.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, param: str, request_id: str) -> None:
        # Proxies must neither buffer nor cache events.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._param = param
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            logger.debug(
                "The client of request %s left.", self._request_id, extra={"fields": {"request_id": self._request_id}}
            )

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            data = await anext(events, DONE)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while data is not DONE:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await self._next(events)
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _next(self, events: AsyncGenerator[bytes, None]) -> bytes:
        try:
            return await anext(events, DONE)
        except Exception as error:
            answer = as_api_error(error, param=self._param, request_id=self._request_id)
            if answer.status == 500:
                logger.error(
                    "Request %s failed in mid-stream.",
                    self._request_id,
                    exc_info=error,
                    extra={"fields": {"request_id": self._request_id}},
                )
            return event(answer.encoded())


class ChunkEncoder(Generic[_ChoiceT]):
    """Encodes the chunks of one stream; a few microseconds each, since only the choice differs.

    Args:
        make: Makes a chunk from its choices and its usage; everything else in it is constant.
        includes_usage: Whether the last chunk has the usage, and the others a null.
        is_continuous: Whether every chunk has the usage.
    """

    def __init__(
        self,
        make: Callable[[list[_ChoiceT], Any], msgspec.Struct],
        *,
        includes_usage: bool,
        is_continuous: bool,
    ) -> None:
        self._make = make
        self._encode = msgspec.json.Encoder().encode
        self._usage = None if includes_usage else msgspec.UNSET
        self.includes_usage = includes_usage
        self.is_continuous = is_continuous
        # Quotes in names are escaped, so this cannot be found inside one.
        head, tail = self._encode(make([], self._usage)).split(_EMPTY, 1)
        self._head = b"data: " + head + b'"choices":['
        self._tail = b"]" + tail + b"\n\n"

    def chunk(self, choice: _ChoiceT, usage: Callable[[], Usage], **more: Any) -> bytes:
        """Return an event with one choice.

        Args:
            choice: New part of the choice.
            usage: Counts the usage so far; called only if every chunk has it.
            more: Other fields of this chunk alone.
        """
        if self.is_continuous or more:
            whole = self._make([choice], usage() if self.is_continuous else self._usage)
            return event(self._encode(msgspec.structs.replace(whole, **more)))
        return self._head + self._encode(choice) + self._tail

    def last(self, usage: Usage) -> bytes:
        """Return the event with the usage, without choices; empty if not requested."""
        return event(self._encode(self._make([], usage))) if self.includes_usage else b""


def finish_name(output: CompletionOutput) -> Literal["stop", "length"]:
    """Return OpenAI's finish reason of a completion that neither failed nor was aborted. Pure."""
    return "length" if output.finish_reason is FinishReason.LENGTH else "stop"


class Progress:
    """Tracks the sent part of one completion; outputs are cumulative, chunks are not.

    Args:
        has_token_ids: Whether token ids are wanted; otherwise :meth:`take` returns none.

    Attributes:
        is_open: True once everything before the text was sent.
        is_finished: True once the finish reason was sent.
    """

    def __init__(self, *, has_token_ids: bool = True) -> None:
        self.is_open = False
        self.is_finished = False
        self._has_token_ids = has_token_ids
        self._num_characters = 0
        self._num_tokens = 0
        self._num_logprobs = 0

    def take(self, output: CompletionOutput) -> tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Return the text, token ids and log-probabilities since the last call. O(their number)."""
        logprobs = output.logprobs or ()
        text = output.text[self._num_characters :]
        token_ids = tuple(output.token_ids[self._num_tokens :]) if self._has_token_ids else ()
        entries = logprobs[self._num_logprobs :]
        self._num_characters, self._num_logprobs = len(output.text), len(logprobs)
        self._num_tokens += len(token_ids)
        return text, token_ids, entries
