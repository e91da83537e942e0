from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.link import Link, LinkClosedError


def pair() -> tuple[Link, Link]:
    one, other = socket.socketpair()
    return Link(one), Link(other)


@given(st.lists(st.lists(st.binary(max_size=300), max_size=3), max_size=20))
def test_messages_come_as_they_were_sent_in_order(messages: list[list[bytes]]) -> None:
    one, other = pair()
    for parts in messages:
        one.send(*parts)
    received: list[bytes] = []
    while len(received) < len(messages):
        received += other.receive()
    assert received == [b"".join(parts) for parts in messages]
    assert other.receive() == []
    one.close()
    other.close()


def test_what_the_socket_does_not_take_waits_and_nothing_is_lost() -> None:
    one, other = pair()
    messages = [bytes([number]) * size for number, size in enumerate((3_000_000, 10, 9_000_000, 0, 3_000_000))]
    for message in messages:
        one.send(message)  # returns, although nobody reads
    assert one.has_unsent
    received: list[bytes] = []
    while len(received) < len(messages):
        one.flush()
        received += other.receive()
    assert received == messages
    assert not one.has_unsent
    one.close()
    other.close()


def test_what_came_before_the_end_is_received_and_then_the_end() -> None:
    one, other = pair()
    other.send(b"never read")  # the end is then reported as a reset
    one.send(b"last")
    one.close()
    assert other.receive() == [b"last"]
    for call in (other.receive, lambda: other.send(b"more")):
        with pytest.raises(LinkClosedError):
            call()
    other.close()
