"""Events that are written to the connection directly: only while the client takes them, counted, and in order with what is yielded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from trencadis.client.output_stream import OutputStream
from trencadis.records import CompletionOutput, FinishReason, RequestOutput
from trencadis_server.generation.connection import DIRECT_WRITES, direct_writes
from trencadis_server.lifecycle.guarded_connection import _DirectWrites
from trencadis_server.middleware.request_context import _Answer


def output(text, *, is_last=False):
    reason = FinishReason.LENGTH if is_last else None
    one = CompletionOutput(index=0, text=text, token_ids=(), finish_reason=reason)
    return RequestOutput(request_id="a", prompt=None, prompt_token_ids=(1,), outputs=(one,), finished=is_last)


def cycle(**values):
    written = []
    known = {"response_started": True, "chunked_encoding": True, "response_complete": False, "disconnected": False}
    return SimpleNamespace(
        **(known | {"flow": SimpleNamespace(write_paused=False)} | values),
        transport=SimpleNamespace(write=written.append),
        written=written,
    )


def test_a_part_is_one_chunk_of_http_and_is_counted():
    served, sent = cycle(), []

    async def send(message):
        sent.append(message)

    direct = _DirectWrites(served)
    assert direct.is_ready
    answer = _Answer(send, "id", direct)
    direct.write(b"data: {}\n\n")
    asyncio.run(answer.send({"type": "http.response.body", "body": b"data: [DONE]\n\n"}))
    assert (served.written, len(sent)) == ([b"a\r\ndata: {}\n\n\r\n"], 1)
    assert (answer.num_bytes, _Answer(send, "id", None).num_bytes) == (10 + 14, 0)


@pytest.mark.parametrize(
    "state",
    [
        {"response_started": False},
        {"chunked_encoding": None},
        {"response_complete": True},
        {"disconnected": True},
        {"flow": SimpleNamespace(write_paused=True)},
    ],
    ids=["not begun", "not in chunks", "over", "client gone", "client does not take it"],
)
@pytest.mark.representatives(5)
def test_nothing_is_written_directly_unless_the_client_takes_it(state):
    assert not _DirectWrites(cycle(**state)).is_ready


def test_a_scope_without_the_extension_has_no_direct_way():
    assert direct_writes({}) is None
    assert direct_writes({"extensions": {DIRECT_WRITES: 5}}) == 5


def test_outputs_are_offered_only_while_the_reader_waits():
    async def run():
        offered, takes = [], [True]

        def take(one):
            offered.append(one.outputs[0].text)
            return takes[0]

        stream = OutputStream(asyncio.get_running_loop(), take)
        stream.put(output("before anyone waits"))
        assert (offered, stream.is_empty) == ([], False)
        assert stream.take() is not None
        waiter = stream.changed()
        stream.put(output("one"))
        stream.put(output("one two"))
        assert (offered, stream.is_empty, waiter.done()) == (["one", "one two"], True, False)
        takes[0] = False
        stream.put(output("one two three"))
        stream.put(output("one two three four"))
        await waiter
        assert offered == ["one", "one two", "one two three"]
        assert stream.take().outputs[0].text == "one two three four"
        takes[0], waiter = True, stream.changed()
        stream.put(output("the end", is_last=True))
        await waiter
        assert stream.take().finished

    asyncio.run(run())


def test_an_error_while_an_output_is_written_ends_its_stream_alone():
    async def run():
        def take(one):
            raise RuntimeError("no more")

        stream = OutputStream(asyncio.get_running_loop(), take)
        waiter = stream.changed()
        stream.put(output("one"))
        await waiter
        with pytest.raises(RuntimeError, match="no more"):
            stream.take()

    asyncio.run(run())


def test_a_reader_that_was_cancelled_is_offered_nothing():
    async def run():
        offered = []
        stream = OutputStream(asyncio.get_running_loop(), lambda one: not offered.append(one))
        stream.changed().cancel()
        stream.put(output("one"))
        assert (offered, stream.is_empty) == ([], False)

    asyncio.run(run())
