from __future__ import annotations

import asyncio
import functools
import threading

import pytest

from trencadis.client.output_stream import OutputStream, call_on_loops
from trencadis.records import RequestOutput


def output(name: str) -> RequestOutput:
    return RequestOutput(request_id=name, prompt=None, prompt_token_ids=(), outputs=(), finished=False)


async def next_of(stream: OutputStream) -> RequestOutput:
    while (found := stream.take()) is None:
        await stream.changed()
    return found


def test_a_slow_reader_is_given_the_newest_output_once() -> None:
    async def read() -> str:
        stream = OutputStream(asyncio.get_running_loop())
        stream.put(output("old"))
        stream.put(output("new"))
        first = (await next_of(stream)).request_id
        assert stream.take() is None
        return first

    assert asyncio.run(read()) == "new"


def test_an_error_is_raised_now_and_ever_after() -> None:
    async def read() -> None:
        stream = OutputStream(asyncio.get_running_loop())
        stream.fail(KeyError("gone"))
        for _ in range(2):
            with pytest.raises(KeyError, match="gone"):
                await next_of(stream)

    asyncio.run(read())


def test_calls_from_another_thread_reach_every_loop_in_order() -> None:
    async def read() -> list[str]:
        streams = [OutputStream(asyncio.get_running_loop()) for _ in range(3)]
        calls = [(stream, functools.partial(stream.put, output(str(i)))) for i, stream in enumerate(streams)]
        thread = threading.Thread(target=call_on_loops, args=(calls,))
        thread.start()
        names = [(await next_of(stream)).request_id for stream in streams]
        thread.join()
        return names

    assert asyncio.run(read()) == ["0", "1", "2"]


def test_a_loop_is_woken_once_for_all_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def count() -> int:
        loop = asyncio.get_running_loop()
        streams = [OutputStream(loop) for _ in range(5)]
        assert await asyncio.to_thread(wakes_of, loop, streams) == 1
        return wakes_of(loop, streams)

    def wakes_of(loop: asyncio.AbstractEventLoop, streams: list[OutputStream]) -> int:
        num_wakes = 0
        wake = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal num_wakes
            num_wakes += 1
            return wake(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        call_on_loops((stream, functools.partial(stream.put, output("a"))) for stream in streams)
        monkeypatch.undo()
        return num_wakes

    assert asyncio.run(count()) == 0  # its own thread need not wake it


def test_streams_of_a_closed_loop_are_returned() -> None:
    loop = asyncio.new_event_loop()
    stream = OutputStream(loop)
    loop.close()
    assert call_on_loops([(stream, functools.partial(stream.put, output("a")))]) == [stream]
