from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import EngineEndedError
from trencadis.remote.link import Link
from trencadis.remote.messages import AliveMessage, AskMetricsMessage, CloseMessage, decode_client_message, encode


def send_for_ever(link: Link) -> None:
    while True:
        link.send(AskMetricsMessage())


def test_an_interrupt_ends_the_present_wait_and_the_next_one(open_line: Callable[..., Any]) -> None:
    link = open_line().link
    link.interrupt()
    assert link.receive(has_work=False) == []
    threading.Timer(0.05, link.interrupt).start()
    assert link.receive(has_work=False) == []
    assert link.receive(0.001, has_work=False) == []


def test_the_end_of_the_peer_is_heard_at_once_also_without_work(open_line: Callable[..., Any]) -> None:
    line = open_line()
    threading.Timer(0.05, line.peer.end).start()
    start_s = time.monotonic()
    with pytest.raises(EngineEndedError, match="process ended in a test"):
        line.link.receive(has_work=False)
    assert time.monotonic() - start_s < 30
    assert "ended in a test" in line.link.failure
    with pytest.raises(EngineEndedError, match="ended in a test"):
        line.link.check()


def test_last_words_are_read_before_the_end(open_line: Callable[..., Any]) -> None:
    line = open_line()
    line.far.send(encode(AliveMessage()))
    line.peer.end()
    assert line.link.receive(has_work=False) == [AliveMessage()]
    with pytest.raises(EngineEndedError, match="ended in a test"):
        line.link.receive(has_work=False)


def test_silence_with_work_is_a_hang_and_without_work_it_is_none(open_line: Callable[..., Any]) -> None:
    clock = SimulatedClock()
    line = open_line(watchdog_s=3.0, clock=clock)
    clock.advance(100)
    assert line.link.receive(0, has_work=False) == []
    line.link.work_begins()
    clock.advance(2.9)
    assert line.link.receive(0, has_work=True) == []
    line.far.send(encode(AliveMessage()))
    while not line.link.receive(1, has_work=True):
        pass
    clock.advance(2.9)
    assert line.link.receive(0, has_work=True) == []
    clock.advance(0.2)
    with pytest.raises(EngineEndedError, match=r"hung: .* silent for 3 s \(\[engine\] watchdog_s\); it was killed"):
        line.link.receive(0, has_work=True)
    assert line.peer.was_killed


def test_a_message_that_is_there_counts_however_long_nobody_looked(open_line: Callable[..., Any]) -> None:
    clock = SimulatedClock()
    line = open_line(watchdog_s=3.0, clock=clock)
    line.link.work_begins()
    line.far.send(encode(AliveMessage()))
    line.link._channel.wait(10, watching=False)
    clock.advance(1000)  # as if this process had been stopped
    assert line.link.receive(0, has_work=True) == [AliveMessage()]


def test_a_peer_that_takes_nothing_hangs_too(open_line: Callable[..., Any]) -> None:
    line = open_line(watchdog_s=0.1, high_water_mark=1)
    with pytest.raises(EngineEndedError, match="hung"):
        send_for_ever(line.link)
    assert line.peer.was_killed


def test_the_end_is_heard_while_sending(open_line: Callable[..., Any]) -> None:
    line = open_line(high_water_mark=1)
    line.link.interrupt()
    threading.Timer(0.1, line.peer.end).start()
    with pytest.raises(EngineEndedError, match="ended in a test"):
        send_for_ever(line.link)


def test_closing_asks_first_and_then_waits_for_the_end(open_line: Callable[..., Any]) -> None:
    line = open_line()
    asked: list[Any] = []

    def peer() -> None:
        line.far.wait(60)
        asked.extend(decode_client_message(data) for data in line.far.receive())
        line.peer.end()

    thread = threading.Thread(target=peer)
    thread.start()
    line.link.close()
    thread.join()
    assert asked == [CloseMessage()]
    assert line.peer.was_closed
    assert not line.peer.was_killed
    line.link.close()
