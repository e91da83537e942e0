"""Server-sent events, and what of a completion was sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from trencadis.errors import EngineEndedError
from trencadis.records import CompletionOutput, FinishReason, TokenLogprobs
from trencadis_server.errors import ApiError
from trencadis_server.generation.sse import (
    ChunkEncoder,
    EventStream,
    Progress,
    check_stream_options,
    event,
    finish_name,
)
from trencadis_server.protocol.answers import Usage
from trencadis_server.protocol.generation import GenerationRequest, StreamOptions


class Chunk(msgspec.Struct, frozen=True):
    id: str
    choices: list[int]
    usage: Any = UNSET


USAGE = Usage.of(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
# A name that looks like the place where the choice goes.
AWKWARD = '"choices":[]'


async def stays() -> Any:
    await asyncio.Event().wait()


def run(events: AsyncGenerator[bytes, None], receive: Any = stays) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        await EventStream(events, param="prompt", request_id="r1")({"type": "http"}, receive, send)

    asyncio.run(main())
    return sent


async def of(*items: Any) -> AsyncGenerator[bytes, None]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def test_events_are_sent_one_by_one_and_then_the_end() -> None:
    start, *bodies = run(of(event(b"1"), event(b"2")))
    assert (start["status"], dict(start["headers"])[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    assert b"content-length" not in dict(start["headers"])
    assert [body["body"] for body in bodies] == [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
    assert [body["more_body"] for body in bodies] == [True, True, False]


def test_an_error_before_the_first_event_is_left_to_those_who_make_statuses() -> None:
    with pytest.raises(EngineEndedError):
        run(of(EngineEndedError("gone")))


def test_an_error_later_is_an_event_and_ends_the_stream() -> None:
    bodies = [message["body"] for message in run(of(event(b"1"), EngineEndedError("gone"), event(b"2")))[1:]]
    assert bodies[0] == b"data: 1\n\n"
    assert json.loads(bodies[1].removeprefix(b"data: "))["error"]["message"] == "gone"
    assert bodies[2:] == [b"data: [DONE]\n\n"]


def test_an_unexpected_error_tells_no_more_than_the_request_id(caplog: Any) -> None:
    bodies = [message["body"] for message in run(of(event(b"1"), ValueError("secret")))[1:]]
    assert b"secret" not in bodies[1]
    assert b"r1" in bodies[1]
    assert "secret" in caplog.text


def test_the_generator_is_closed_when_the_client_leaves() -> None:
    closed = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield event(b"1")
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    async def leaves() -> Any:
        for _ in range(10):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    run(endless(), leaves)
    assert closed == [True]


def test_an_error_of_the_connection_is_no_event() -> None:
    async def main() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise OSError("the client takes nothing")

        with pytest.raises(OSError, match="takes nothing"):
            await EventStream(of(event(b"1")), param="prompt", request_id="r1")({"type": "http"}, stays, send)

    asyncio.run(main())


@pytest.mark.parametrize("includes_usage", [False, True])
def test_a_chunk_is_what_encoding_it_whole_gives(includes_usage: bool) -> None:
    def make(choices: list[int], usage: Any) -> Chunk:
        return Chunk(id=AWKWARD, choices=choices, usage=usage)

    encoder: ChunkEncoder[int] = ChunkEncoder(make, includes_usage=includes_usage, is_continuous=False)
    expected = Chunk(id=AWKWARD, choices=[5], usage=None if includes_usage else UNSET)
    assert encoder.chunk(5, lambda: USAGE) == event(msgspec.json.encode(expected))
    last = event(msgspec.json.encode(Chunk(id=AWKWARD, choices=[], usage=USAGE)))
    assert encoder.last(USAGE) == (last if includes_usage else b"")


def test_continuous_usage_and_fields_of_one_chunk_are_in_that_chunk() -> None:
    def make(choices: list[int], usage: Any) -> Chunk:
        return Chunk(id="a", choices=choices, usage=usage)

    encoder: ChunkEncoder[int] = ChunkEncoder(make, includes_usage=True, is_continuous=True)
    assert encoder.chunk(5, lambda: USAGE, id="b") == event(msgspec.json.encode(Chunk("b", [5], USAGE)))


@pytest.mark.parametrize(
    ("stream", "options", "expected"),
    [
        (True, None, (False, False)),
        (True, StreamOptions(include_usage=True), (True, False)),
        (True, StreamOptions(include_usage=True, continuous_usage_stats=True), (True, True)),
        (True, StreamOptions(continuous_usage_stats=True), (False, False)),
        (None, None, (False, False)),
    ],
)
def test_stream_options_say_where_the_usage_is(stream: Any, options: Any, expected: tuple[bool, bool]) -> None:
    assert check_stream_options(GenerationRequest(model="m", stream=stream, stream_options=options)) == expected


def test_stream_options_without_a_stream_are_refused() -> None:
    with pytest.raises(ApiError, match="needs stream"):
        check_stream_options(GenerationRequest(model="m", stream_options=StreamOptions()))


def entry(position: int) -> TokenLogprobs:
    return TokenLogprobs(index=0, position=position, token_id=position, logprob=-1.0, rank=1)


def output(num_tokens: int, *, has_logprobs: bool = True) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text="ab" * num_tokens,
        token_ids=tuple(range(num_tokens)),
        logprobs=tuple(entry(i) for i in range(num_tokens)) if has_logprobs else None,
    )


def test_each_call_gives_what_is_new() -> None:
    progress = Progress()
    assert progress.take(output(1)) == ("ab", (0,), (entry(0),))
    assert progress.take(output(1)) == ("", (), ())
    assert progress.take(output(3)) == ("abab", (1, 2), (entry(1), entry(2)))


def test_without_logprobs_there_are_none() -> None:
    assert Progress().take(output(2, has_logprobs=False)) == ("abab", (0, 1), ())


def test_reasons_have_the_names_of_openai() -> None:
    names = {
        reason: finish_name(CompletionOutput(index=0, text="", token_ids=(), finish_reason=reason))
        for reason in (FinishReason.STOP, FinishReason.LENGTH)
    }
    assert names == {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def test_token_ids_that_nobody_wants_are_not_looked_for() -> None:
    progress = Progress(has_token_ids=False)
    assert [progress.take(output(size))[:2] for size in (1, 3)] == [("ab", ()), ("abab", ())]
