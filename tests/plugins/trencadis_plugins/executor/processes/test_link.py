from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis_plugins.executor.ranks.link import Kind, LinkClosedError, RankLink


def pair() -> tuple[RankLink, RankLink]:
    one, other = socket.socketpair()
    return RankLink(one), RankLink(other)


@given(st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=300)), max_size=20))
def test_messages_come_as_they_were_sent_in_order(messages):
    one, other = pair()
    for kind, number, payload in messages:
        one.send(kind, number, payload)
    received = []
    while len(received) < len(messages):
        received.append(other.receive())
    assert received == messages
    assert other.receive() is None
    one.close()
    other.close()


def test_what_the_socket_does_not_take_waits_and_nothing_is_lost():
    one, other = pair()
    payloads = [bytes([number]) * 3_000_000 for number in range(4)]
    for number, payload in enumerate(payloads):
        one.send(Kind.CALL, number, payload)  # returns, although nobody reads
    assert one.has_unsent
    received = []
    while len(received) < len(payloads):
        one.flush()
        message = other.receive()
        if message is not None:
            received.append(message[2])
    assert received == payloads
    assert not one.has_unsent
    one.close()
    other.close()


def test_what_came_before_the_end_is_received_and_then_the_end():
    one, other = pair()
    one.send(Kind.RESULT, 3, b"last")
    one.close()
    assert other.receive() == (Kind.RESULT, 3, b"last")
    with pytest.raises(LinkClosedError):
        other.receive()
    with pytest.raises(LinkClosedError):
        other.send(Kind.CALL, 1)
    other.close()
