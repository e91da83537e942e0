from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from trencadis.errors import EngineEndedError
from trencadis_remote.process.messages import (
    CloseMessage,
    GetMetricsMessage,
    MetricsMessage,
)
from trencadis_remote.process.transport import Transport
from trencadis_remote.process.wire import decode_client_message, encode


def send_for_ever(transport: Transport) -> None:
    while True:
        transport.send(GetMetricsMessage())


def test_an_interrupt_ends_the_present_wait_and_the_next_one(open_line: Callable[..., Any]) -> None:
    transport = open_line().transport
    transport.interrupt()
    assert transport.wait() == []
    threading.Timer(0.05, transport.interrupt).start()
    assert transport.wait() == []
    assert transport.wait(0.001) == []


def test_the_end_of_the_peer_is_heard_at_once_also_without_work(open_line: Callable[..., Any]) -> None:
    line = open_line()
    threading.Timer(0.05, line.peer.end).start()
    start_s = time.monotonic()
    with pytest.raises(EngineEndedError, match="process ended in a test"):
        line.transport.wait()
    assert time.monotonic() - start_s < 30
    assert "ended in a test" in line.transport.failure
    with pytest.raises(EngineEndedError, match="ended in a test"):
        line.transport.check()


def test_last_words_are_read_before_the_end(open_line: Callable[..., Any]) -> None:
    line = open_line()
    line.far.send(encode(MetricsMessage(text="last")))
    line.peer.end()
    assert line.transport.wait() == [MetricsMessage(text="last")]
    with pytest.raises(EngineEndedError, match="ended in a test"):
        line.transport.wait()


def test_a_message_that_cannot_be_read_ends_the_connection_in_words(open_line: Callable[..., Any]) -> None:
    line = open_line()
    line.far.send(msgspec.msgpack.encode(["MetricsMessage", 5]))
    with pytest.raises(EngineEndedError, match=r"sent a message that cannot be read: Expected `str`, got `int`"):
        line.transport.wait(10)
    with pytest.raises(EngineEndedError, match="cannot be read"):
        line.transport.check()


def test_the_end_is_heard_while_sending(open_line: Callable[..., Any]) -> None:
    line = open_line(room=1)
    line.transport.interrupt()
    threading.Timer(0.1, line.peer.end).start()
    with pytest.raises(EngineEndedError, match="ended in a test"):
        send_for_ever(line.transport)


def test_closing_asks_first_and_then_waits_for_the_end(open_line: Callable[..., Any]) -> None:
    line = open_line()
    asked: list[Any] = []

    def peer() -> None:
        line.far.wait(60)
        asked.extend(decode_client_message(data) for data in line.far.receive())
        line.peer.end()

    thread = threading.Thread(target=peer)
    thread.start()
    line.transport.close()
    thread.join()
    assert asked == [CloseMessage()]
    assert line.peer.was_closed
    line.transport.close()


def test_what_came_is_decoded_in_portions_and_in_order(open_line: Callable[..., Any]) -> None:
    line = open_line()
    texts = [str(number) * 60_000 for number in range(9)]
    for text in texts:
        line.far.send(encode(MetricsMessage(text=text)))
    got: list[str] = []
    portions = []
    while len(got) < len(texts):
        portion = [message.text for message in line.transport.wait(10)]
        portions.append(len(portion))
        got += portion
    assert got == texts
    assert max(portions) <= 3
    assert not line.transport.has_rest
