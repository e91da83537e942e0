from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from trencadis_remote.process.channel import Channel, WakeUpFile


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    sockets = socket.socketpair()
    both = Channel(sockets[0]), Channel(sockets[1])
    for end in sockets:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
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
            ends[0].send(bytes(100), while_waiting=give_up)
            num_sent += 1

    with pytest.raises(GivesUpError):
        send_for_ever()
    received: list[bytes] = []
    while len(received) < num_sent:
        ends[1].wait(60)
        received += ends[1].receive()
    assert num_sent > 1
    assert set(received) == {bytes(100)}


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


def is_readable(file: Any) -> bool:
    return bool(select.select([file], [], [], 0)[0])


def test_one_that_never_waits_keeps_what_does_not_fit_and_its_file_tells_when_more_does() -> None:
    sockets = socket.socketpair()
    near, far = Channel(sockets[0], never_waits=True), Channel(sockets[1])
    for number in range(300):
        near.send(bytes([number % 256]) * 100_000)
    assert not is_readable(near)
    received: list[bytes] = []
    while len(received) < 300:
        received += far.receive()
        if is_readable(near):
            assert near.receive() == []
    assert [data[0] for data in received] == [number % 256 for number in range(300)]
    near.close()
    far.close()


def test_of_an_end_that_closes_what_it_sent_comes_and_then_nothing_more(ends: tuple[Channel, Channel]) -> None:
    ends[1].send(b"last")
    ends[1].close()
    ends[1].close()
    assert is_readable(ends[0])
    assert ends[0].receive() == [b"last"]
    assert ends[0].receive() == []
    assert not is_readable(ends[0])
    ends[0].send(b"dropped")
    assert ends[0].wait(0.001) == []


def test_the_first_message_is_taken_alone_and_waited_for(ends: tuple[Channel, Channel]) -> None:
    threading.Timer(0.05, lambda: [ends[1].send(data) for data in (b"one", b"two")]).start()
    assert ends[0].receive_first() == b"one"
    assert ends[0].receive_first() == b"two"


@pytest.fixture
def wake_up() -> Iterator[WakeUpFile]:
    made = WakeUpFile()
    yield made
    made.close()


def test_it_is_readable_from_wake_to_clear(wake_up: WakeUpFile) -> None:
    assert not is_readable(wake_up)
    for _ in range(3):
        wake_up.wake()
    assert is_readable(wake_up)
    wake_up.clear()
    assert not is_readable(wake_up)
    wake_up.clear()
    wake_up.wake()
    assert is_readable(wake_up)


def test_after_closing_nothing_happens(wake_up: WakeUpFile) -> None:
    wake_up.close()
    wake_up.wake()
    wake_up.clear()
    wake_up.close()
