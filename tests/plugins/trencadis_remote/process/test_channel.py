from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trencadis_remote.process.channel import Channel, WakeUpFile


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


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    channel = Channel(f"ipc://{tmp_path}/y", binds=True)
    channel.close()
    channel.close()


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
