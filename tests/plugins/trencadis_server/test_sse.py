from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from trencadis.errors import EngineEndedError
from trencadis_server.errors import ApiError
from trencadis_server.generation.sse import ChunkEncoder, EventStream, check_stream_options, event
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
