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
from trencadis.records import CompletionOutput, TokenLogprobs
from trencadis_server.errors import ApiError
from trencadis_server.generation.sse import (
    ChunkEncoder,
    EventStream,
    Progress,
    check_stream_options,
    event,
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


def test_an_error_later_is_an_event_and_ends_the_stream_and_an_unexpected_one_tells_the_request_id_alone(
    caplog: Any,
) -> None:
    for error, words in ((EngineEndedError("gone"), "gone"), (ValueError("secret"), "r1")):
        first, told, *rest = [message["body"] for message in run(of(event(b"1"), error, event(b"2")))[1:]]
        assert (first, rest) == (b"data: 1\n\n", [b"data: [DONE]\n\n"])
        assert words in json.loads(told.removeprefix(b"data: "))["error"]["message"]
        assert b"secret" not in told
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


@pytest.mark.parametrize(("includes_usage", "is_continuous"), [(False, False), (True, False), (True, True)])
def test_a_chunk_is_what_encoding_it_whole_gives(includes_usage: bool, is_continuous: bool) -> None:
    def make(choices: list[int], usage: Any) -> Chunk:
        return Chunk(id=AWKWARD, choices=choices, usage=usage)

    encoder: ChunkEncoder[int] = ChunkEncoder(make, includes_usage=includes_usage, is_continuous=is_continuous)
    usage = USAGE if is_continuous else None if includes_usage else UNSET
    assert encoder.chunk(5, lambda: USAGE) == event(msgspec.json.encode(make([5], usage)))
    assert encoder.chunk(5, lambda: USAGE, id="b") == event(msgspec.json.encode(Chunk("b", [5], usage)))
    assert encoder.last(USAGE) == (event(msgspec.json.encode(make([], USAGE))) if includes_usage else b"")


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


def test_each_call_gives_what_is_new_and_wanted() -> None:
    entries = [TokenLogprobs(index=0, position=i, token_id=i, logprob=-1.0, rank=1) for i in range(3)]

    def output(size: int, logprobs: tuple[TokenLogprobs, ...] | None = None) -> CompletionOutput:
        return CompletionOutput(index=0, text="ab" * size, token_ids=tuple(range(size)), logprobs=logprobs)

    progress = Progress()
    taken = [progress.take(output(size, tuple(entries[:size]))) for size in (1, 1, 3)]
    assert taken == [("ab", (0,), (entries[0],)), ("", (), ()), ("abab", (1, 2), tuple(entries[1:]))]
    assert Progress().take(output(2)) == ("abab", (0, 1), ())
    progress = Progress(has_token_ids=False)
    assert [progress.take(output(size))[:2] for size in (1, 3)] == [("ab", ()), ("abab", ())]
