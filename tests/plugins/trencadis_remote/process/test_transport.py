from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trencadis.errors import EngineEndedError
from trencadis_remote.process.channel import Channel, WakeUpFile
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
    line = open_line(high_water_mark=1)
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


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel, Channel]]:
    address = f"ipc://{tmp_path}/x"
    both = Channel(address, binds=True, high_water_mark=1), Channel(address, binds=False, high_water_mark=1)
    yield both
    for channel in both:
        channel.close()


def exchange(channel: Channel, num_messages: int, size: int, received: list[int]) -> None:
    for number in range(num_messages):
        channel.send(number.to_bytes(4, "little") + bytes(size))
        received.extend(int.from_bytes(data[:4], "little") for data in channel.receive())
    while len(received) < num_messages:
        channel.wait()
        received.extend(int.from_bytes(data[:4], "little") for data in channel.receive())


def test_with_the_smallest_sockets_every_message_of_both_sides_arrives_in_order(ends: tuple[Channel, Channel]) -> None:
    received: tuple[list[int], list[int]] = [], []
    threads = [
        threading.Thread(target=exchange, args=(channel, 4000, 3000, outputs), daemon=True)
        for channel, outputs in zip(ends, received, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert received == (list(range(4000)), list(range(4000)))


def test_a_sender_that_nobody_reads_waits_and_may_give_up(ends: tuple[Channel, Channel]) -> None:
    class GivesUpError(Exception):
        pass

    def give_up(readable: list[int]) -> float:
        raise GivesUpError

    num_sent = 0

    def send_for_ever() -> None:
        nonlocal num_sent
        while True:
            ends[0].send(bytes(10_000), while_waiting=give_up)
            num_sent += 1

    with pytest.raises(GivesUpError):
        send_for_ever()
    received = 0
    while received < num_sent:
        ends[1].wait(60)
        received += len(ends[1].receive())
    assert received == num_sent


def test_waiting_ends_with_time_or_with_a_watched_file(ends: tuple[Channel, Channel]) -> None:
    reader, writer = os.pipe()
    ends[0].watch(reader)
    assert ends[0].wait(0.001) == []
    os.write(writer, b"x")
    assert ends[0].wait(60) == [reader]
    ends[1].send(b"hello")
    ends[0].wait(10, watching=False)
    assert ends[0].receive() == [b"hello"]
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("num_messages", [0, 1, 3])
def test_a_message_that_is_likely_need_not_be_there(ends: tuple[Channel, Channel], num_messages: int) -> None:
    for number in range(num_messages):
        ends[1].send(bytes([number]))
    received: list[bytes] = ends[0].receive(is_likely=True)
    while len(received) < num_messages:
        ends[0].wait(60)
        received += ends[0].receive(is_likely=True)
    assert received == [bytes([number]) for number in range(num_messages)]
    assert ends[0].receive(is_likely=True) == []


@pytest.fixture
def wake_up() -> Iterator[WakeUpFile]:
    made = WakeUpFile()
    yield made
    made.close()


def is_awake(wake_up: WakeUpFile) -> bool:
    return bool(select.select([wake_up], [], [], 0)[0])


def test_it_is_readable_from_wake_to_clear(wake_up: WakeUpFile) -> None:
    assert not is_awake(wake_up)
    for _ in range(3):
        wake_up.wake()
    assert is_awake(wake_up)
    wake_up.clear()
    assert not is_awake(wake_up)
    wake_up.clear()
    wake_up.wake()
    assert is_awake(wake_up)


def test_after_closing_nothing_happens(wake_up: WakeUpFile) -> None:
    wake_up.close()
    wake_up.wake()
    wake_up.clear()
    wake_up.close()
