from __future__ import annotations

import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.errors import TransferError
from trencadis_kv.wire.stream import (
    BLOCK_HEAD_BYTES,
    Abort,
    Ack,
    Commit,
    FrameStream,
    Hello,
    Kind,
    Message,
    Proof,
    Pull,
    Refuse,
    Release,
    Renew,
    Welcome,
    block_head,
)

MESSAGES: list[Message] = [
    Hello(version=1, compat=b"c" * 16, block_bytes=64, wants="x", nonce=b"n"),
    Welcome(engine="x", nonce=b"n", proof=b"p"),
    Refuse(cause="lost", reason="because"),
    Proof(proof=b"p"),
    Pull(hold_id="t", hashes=[b"a" * 32, b"b" * 32]),
    Commit(num_blocks=3),
    Abort(cause="corrupt", reason="because"),
    Renew(hold_id="t"),
    Release(hold_id="t"),
    Ack(known=True),
]


@pytest.fixture
def ends() -> Iterator[tuple[FrameStream, socket.socket]]:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield FrameStream(mine, timeout_s=5.0), theirs


def read_all(stream: FrameStream) -> None:
    while True:
        found = stream.receive()
        if isinstance(found, int):
            stream.receive_into(memoryview(bytearray(min(found, 1000))))


def commit(num_blocks: int) -> bytes:
    body = msgspec.msgpack.encode(Commit(num_blocks=num_blocks))
    return struct.pack("<IHH", len(body), Kind.COMMIT, 0) + body


def background(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives_as_it_was_sent(message: Message) -> None:
    one, other = socket.socketpair()
    with one, other:
        FrameStream(one, timeout_s=5).send(message)
        assert FrameStream(other, timeout_s=5).receive() == message


def test_frame_lies_on_the_wire_as_documented(ends: tuple[FrameStream, socket.socket]) -> None:
    ends[0].send(Commit(num_blocks=3))
    assert ends[1].recv(100) == struct.pack("<IHH", 2, 7, 0) + b"\x91\x03"
    assert block_head(b"h" * 128, 1000) == struct.pack("<IHH", 1128, 6, 0) + b"h" * 128
    assert BLOCK_HEAD_BYTES == 136


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<IHH", 2**31, Kind.HELLO, 0),
        struct.pack("<IHH", 2**31, 77, 0),
        struct.pack("<IHH", 70, 99, 0) + b"?" * 70,
        struct.pack("<IHH", 3, Kind.COMMIT, 0) + b"\xc1\xc1\xc1",
        struct.pack("<IHH", 2, Kind.COMMIT, 0) + b"\x91\xa0",
    ],
    ids=["another protocol", "long message", "long unknown", "unknown kind", "no msgpack", "another type"],
)
def test_what_is_no_frame_is_corrupt(ends: tuple[FrameStream, socket.socket], data: bytes) -> None:
    ends[1].sendall(data)
    with pytest.raises(TransferError, match="does not speak") as caught:
        ends[0].receive()
    assert caught.value.cause == "corrupt"


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    one, other = socket.socketpair()
    with one, other:
        other.sendall(data)
        other.shutdown(socket.SHUT_WR)
        stream = FrameStream(one, timeout_s=5)
        with pytest.raises(TransferError):
            read_all(stream)


def test_peer_that_goes_is_unreachable_and_one_that_stalls_misses_the_deadline(
    ends: tuple[FrameStream, socket.socket],
) -> None:
    stream, other = ends
    stream.set_deadline(0.05)
    other.sendall(b"\0")
    with pytest.raises(TransferError) as caught:
        stream.receive()
    assert caught.value.cause == "deadline"
    stream.set_deadline(5)
    other.close()
    with pytest.raises(TransferError) as caught:
        stream.receive()
    assert caught.value.cause == "unreachable"


def test_peer_that_trickles_misses_the_deadline_too(ends: tuple[FrameStream, socket.socket]) -> None:
    stream, other = ends
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.02):
            other.sendall(b"\0")

    thread = background(trickle)
    stream.set_deadline(0.3)
    with pytest.raises(TransferError) as caught:
        stream.receive_into(memoryview(bytearray(1000)))
    ended.set()
    thread.join()
    assert caught.value.cause == "deadline"


def test_who_does_not_read_stops_the_sender_at_the_deadline(ends: tuple[FrameStream, socket.socket]) -> None:
    stream, _ = ends
    stream.set_deadline(0.05)
    with pytest.raises(TransferError) as caught:
        stream.send_pieces([bytes(1 << 20)] * 64)
    assert caught.value.cause == "deadline"


def test_many_pieces_arrive_in_order(ends: tuple[FrameStream, socket.socket]) -> None:
    stream, other = ends
    pieces = [bytes([i % 251]) * (i % 7 * 1000) for i in range(1500)]
    thread = background(lambda: stream.send_pieces(pieces))
    target = bytearray(sum(map(len, pieces)))
    FrameStream(other, timeout_s=10).receive_into(memoryview(target))
    thread.join()
    assert bytes(target) == b"".join(pieces)


@pytest.mark.parametrize("first_part", [1, 100, 128, 150, 300, 303, 308, 310])
def test_block_is_taken_however_the_bytes_come_and_so_is_what_follows(
    ends: tuple[FrameStream, socket.socket], first_part: int
) -> None:
    stream, other = ends
    data = bytes(range(256)) + bytes(44)

    def send() -> None:
        sent = data + commit(3)
        other.sendall(sent[:first_part])
        threading.Event().wait(0.01)
        other.sendall(sent[first_part:])

    thread = background(send)
    first, second = bytearray(128), bytearray(172)
    stream.receive_block(memoryview(first), memoryview(second))
    thread.join(60)
    assert bytes(first + second) == data
    assert stream.receive() == Commit(num_blocks=3)
    other.sendall(commit(4))
    assert stream.receive() == Commit(num_blocks=4)


def test_block_that_is_the_last_word_is_taken_and_the_silence_noticed_afterwards(
    ends: tuple[FrameStream, socket.socket],
) -> None:
    stream, other = ends
    other.sendall(bytes(range(200)) + b"half")
    other.shutdown(socket.SHUT_WR)
    first, second = bytearray(128), bytearray(72)
    stream.receive_block(memoryview(first), memoryview(second))
    assert bytes(first + second) == bytes(range(200))
    with pytest.raises(TransferError, match="closed the connection"):
        stream.receive()


def test_more_is_there_when_it_comes_and_when_the_other_side_goes(ends: tuple[FrameStream, socket.socket]) -> None:
    stream, other = ends
    assert not stream.has_more(0.01)
    other.sendall(b"x")
    assert stream.has_more(60.0)
    assert stream.has_more(0.0), "it was not taken"
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(TransferError):
        stream.receive()
    assert stream.has_more(60.0)


def test_cut_wakes_who_waits(ends: tuple[FrameStream, socket.socket]) -> None:
    stream, _ = ends
    errors: list[TransferError] = []

    def wait() -> None:
        try:
            stream.receive()
        except TransferError as error:
            errors.append(error)

    thread = background(wait)
    stream.cut()
    thread.join(60)
    assert [error.cause for error in errors] == ["unreachable"]
    stream.close()
    stream.close()
    stream.cut()


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.BLOCK, 99])
@pytest.mark.parametrize("num_bytes", [4097, 16 << 20, (1 << 32) - 1])
def test_long_message_of_a_stranger_is_refused_by_its_head(
    ends: tuple[FrameStream, socket.socket], kind: int, num_bytes: int
) -> None:
    stream, other = ends
    other.sendall(struct.pack("<IHH", num_bytes, kind, 0))
    with pytest.raises(TransferError, match=f"a first message of {num_bytes} bytes"):
        stream.receive()


def test_memory_is_taken_for_what_has_come_and_not_for_what_was_announced(
    ends: tuple[FrameStream, socket.socket],
) -> None:
    stream, other = ends
    stream.trust()
    other.sendall(struct.pack("<IHH", 16 << 20, Kind.PULL, 0) + b"x")
    other.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    try:
        with pytest.raises(TransferError, match="closed the connection"):
            stream.receive()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_hashes", [1, 1900, 2000, 4000, 100_000])
def test_message_of_any_length_arrives_whole(num_hashes: int) -> None:
    message = Pull(hold_id="t", hashes=[number.to_bytes(32, "little") for number in range(num_hashes)])
    one, other = socket.socketpair()
    with one, other:
        stream = FrameStream(other, timeout_s=30)
        stream.trust()
        background(lambda: FrameStream(one, timeout_s=30).send(message))
        assert stream.receive() == message
