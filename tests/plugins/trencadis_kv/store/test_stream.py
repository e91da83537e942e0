from __future__ import annotations

import math
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.errors import TransferError
from trencadis.records import FirstToken, TokenLogprobs
from trencadis_kv.wire import socket_buffers
from trencadis_kv.wire.handshake import Identity, accept, greet
from trencadis_kv.wire.socket_buffers import BUFFER_BYTES, set_buffer
from trencadis_kv.wire.stream import (
    BLOCK_HEAD_BYTES,
    VERSION,
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
from trencadis_kv.wire.stream_messages import (
    BODIES,
    KINDS,
    Token,
    decode_token,
    encode_token,
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


@pytest.mark.parametrize("peer", ["trickles", "does not read", "goes"])
@pytest.mark.representatives(3)
def test_peer_that_is_slow_misses_the_deadline_and_one_that_goes_is_unreachable(
    ends: tuple[FrameStream, socket.socket], peer: str
) -> None:
    stream, other = ends
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.02):
            other.sendall(b"\0")

    thread = background(trickle if peer == "trickles" else lambda: None)
    stream.set_deadline(5.0 if peer == "goes" else 0.2)
    if peer == "goes":
        other.close()
    with pytest.raises(TransferError) as caught:
        stream.send_pieces([bytes(1 << 20)] * 64) if peer == "does not read" else stream.receive_into(
            memoryview(bytearray(1000))
        )
    ended.set()
    thread.join()
    assert caught.value.cause == ("unreachable" if peer == "goes" else "deadline")


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
@pytest.mark.parametrize("num_bytes", [4097, (1 << 32) - 1])
def test_long_message_of_a_stranger_is_refused_by_its_head(
    ends: tuple[FrameStream, socket.socket], kind: int, num_bytes: int
) -> None:
    ends[1].sendall(struct.pack("<IHH", num_bytes, kind, 0))
    with pytest.raises(TransferError, match=f"a first message of {num_bytes} bytes"):
        ends[0].receive()


def test_memory_is_taken_for_what_has_come_and_not_for_what_was_announced(
    ends: tuple[FrameStream, socket.socket],
) -> None:
    ends[0].trust()
    ends[1].sendall(struct.pack("<IHH", 16 << 20, Kind.PULL, 0) + b"x")
    ends[1].shutdown(socket.SHUT_WR)
    tracemalloc.start()
    with pytest.raises(TransferError, match="closed the connection"):
        ends[0].receive()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize("num_hashes", [1, 1900, 2000, 4000, 100_000])
def test_message_of_any_length_arrives_whole(num_hashes: int) -> None:
    message = Pull(hold_id="t", hashes=[number.to_bytes(32, "little") for number in range(num_hashes)])
    one, other = socket.socketpair()
    with one, other:
        stream = FrameStream(other, timeout_s=30)
        stream.trust()
        background(lambda: FrameStream(one, timeout_s=30).send(message))
        assert stream.receive() == message


def test_every_kind_but_a_block_has_a_body_of_its_own_and_the_number_it_always_had() -> None:
    assert set(BODIES) == set(Kind) - {Kind.BLOCK}
    assert {KINDS[body]: body for body in KINDS} == BODIES
    names = (
        "HELLO WELCOME REFUSE PROOF PULL BLOCK COMMIT ABORT RENEW RELEASE ACK STATUS STATE PREFILL_REQUEST PREFILL_RESPONSE PLACED TAKEN "
        "LAYERS"
    )
    assert [kind.name for kind in sorted(Kind)] == names.split()
    assert sorted(Kind) == list(range(1, 19))


def entry(**changes):
    given = {"logprob": -1.25, "rank": 3, "top_token_ids": (7, 8), "top_logprobs": (-0.1, -math.inf)}
    return TokenLogprobs(index=0, position=0, token_id=9, **{**given, **changes})


@pytest.mark.parametrize(
    "first",
    [
        FirstToken(token_id=0),
        FirstToken(token_id=9, logprobs=entry()),
        FirstToken(token_id=9, logprobs=entry(top_token_ids=(), top_logprobs=())),
    ],
)
def test_token_is_the_same_at_the_other_end(first):
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(encode_token(first)), type=Token)
    assert decode_token(travelled) == first


PRODUCER = Identity(engine="p", compat=b"c" * 16, block_bytes=64, secret="between us")


NONCE = bytes(16)


CONSUMER = attrs.evolve(PRODUCER, engine="d")


def meet(producer: Identity, consumer: Identity, *, wants: str = "p") -> tuple[str, str]:
    """Return what each side has against the other; empty for nothing."""
    one, other = socket.socketpair()
    causes = ["", ""]

    def produce() -> None:
        try:
            accept(FrameStream(one, timeout_s=5), producer)
        except TransferError as error:
            causes[0] = error.cause
            one.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=produce, daemon=True)
    with one, other:
        thread.start()
        try:
            greet(FrameStream(other, timeout_s=5), consumer, wants=wants)
            other.shutdown(socket.SHUT_WR)
        except TransferError as error:
            causes[1] = error.cause
            other.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    return causes[0], causes[1]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({}, ""),
        ({"compat": b"d" * 16}, "incompatible"),
        ({"block_bytes": 65}, "incompatible"),
        ({"wants": "its former self"}, "lost"),
        ({"secret": "b"}, "unreachable"),
    ],
    ids=str,
)
@pytest.mark.representatives(5)
def test_both_sides_notice_what_they_do_not_have_in_common(change: dict[str, Any], cause: str) -> None:
    consumer = attrs.evolve(CONSUMER, **{name: value for name, value in change.items() if name != "wants"})
    assert meet(PRODUCER, consumer, wants=change.get("wants", "p")) == (cause, cause)


def test_engine_without_a_secret_is_none() -> None:
    with pytest.raises(ValueError, match="secret"):
        attrs.evolve(PRODUCER, secret="")


@pytest.mark.parametrize("nonce", [b"", bytes(15), bytes(17)])
def test_nonces_of_other_lengths_are_refused(nonce: bytes) -> None:
    """What is authenticated is several fields one after the other: their lengths are fixed."""
    hello = Hello(version=VERSION, compat=b"c" * 16, block_bytes=64, wants="p", nonce=nonce)
    for side, message in ((accept, hello), (partial(greet, wants="p"), Welcome(engine="p", nonce=nonce, proof=b""))):
        one, other = socket.socketpair()
        with one, other:
            FrameStream(one, timeout_s=5).send(message)
            with pytest.raises(TransferError) as caught:
                side(FrameStream(other, timeout_s=5), PRODUCER)
            assert caught.value.cause == "corrupt"


def test_only_who_has_proved_to_know_the_secret_may_send_long_messages() -> None:
    one, other = socket.socketpair()
    with one, other:
        sides = FrameStream(one, timeout_s=5), FrameStream(other, timeout_s=5)
        thread = threading.Thread(target=accept, args=(sides[0], PRODUCER), daemon=True)
        thread.start()
        greet(sides[1], CONSUMER, wants="p")
        thread.join(60)
        for mine, theirs in (sides, sides[::-1]):
            mine.send(Refuse(cause="lost", reason="x" * 5000))
            assert isinstance(theirs.receive(), Refuse)


def test_consumer_without_the_secret_is_not_let_in_by_a_guess() -> None:
    """It skips its own check of the producer, and sends a proof made with another secret."""
    one, other = socket.socketpair()
    with one, other:
        stream = FrameStream(other, timeout_s=5)

        def ask() -> None:
            stream.send(Hello(version=VERSION, compat=CONSUMER.compat, block_bytes=64, wants="p", nonce=b"n" * 16))
            stream.receive()
            from trencadis_kv.wire.stream import Proof

            stream.send(Proof(proof=b"guess" * 6))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        with pytest.raises(TransferError, match="does not know the secret"):
            accept(FrameStream(one, timeout_s=5), PRODUCER)
        thread.join(60)
        assert isinstance(stream.receive(), Refuse)


def test_another_major_version_is_refused_with_both_numbers() -> None:
    one, other = socket.socketpair()
    with one, other:
        FrameStream(one, timeout_s=5).send(
            Hello(version=VERSION + 1, compat=b"", block_bytes=0, wants="p", nonce=NONCE)
        )
        with pytest.raises(TransferError) as caught:
            accept(FrameStream(other, timeout_s=5), PRODUCER)
        assert caught.value.cause == "incompatible"
        answer = FrameStream(one, timeout_s=5).receive()
        assert isinstance(answer, Refuse)
        assert f"version {VERSION + 1}" in answer.reason


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (Welcome(engine="another", nonce=NONCE, proof=b""), "lost"),
        (Refuse(cause="a word of tomorrow", reason="?"), "unreachable"),
        (Hello(version=1, compat=b"", block_bytes=0, wants="", nonce=b""), "corrupt"),
    ],
)
def test_odd_answers_are_errors(answer: Message, cause: str) -> None:
    one, other = socket.socketpair()
    with one, other:
        FrameStream(one, timeout_s=5).send(answer)
        with pytest.raises(TransferError) as caught:
            greet(FrameStream(other, timeout_s=5), CONSUMER, wants="p")
    assert caught.value.cause == cause


def test_secret_is_not_printed() -> None:
    assert "between us" not in repr(attrs.evolve(PRODUCER, secret="between us"))


OPTIONS = {"receive": socket.SO_RCVBUF, "send": socket.SO_SNDBUF}


@pytest.fixture(autouse=True)
def asked_anew():
    socket_buffers._may_have.cache_clear()
    yield
    socket_buffers._may_have.cache_clear()


class Limited(socket.socket):
    """Gets no larger buffer than a kernel's default limit allows, doubled as Linux does."""

    limit = 212992

    def setsockopt(self, level, option, value):
        super().setsockopt(level, option, min(value, self.limit) if level == socket.SOL_SOCKET else value)


@pytest.mark.parametrize("way", OPTIONS)
def test_buffer_is_set_where_the_kernel_allows_it_and_else_left_to_the_kernel(way):
    with socket.socket() as one, socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, OPTIONS[way], BUFFER_BYTES)
        is_allowed = probe.getsockopt(socket.SOL_SOCKET, OPTIONS[way]) >= BUFFER_BYTES
        before = one.getsockopt(socket.SOL_SOCKET, OPTIONS[way])
        set_buffer(one, way)
        after = one.getsockopt(socket.SOL_SOCKET, OPTIONS[way])
    assert (after >= BUFFER_BYTES) if is_allowed else (after == before)


@pytest.mark.parametrize("way", OPTIONS)
def test_buffer_that_would_be_smaller_is_not_set_for_the_kernel_would_not_enlarge_it(way, monkeypatch):
    monkeypatch.setattr(socket, "socket", Limited)
    with Limited() as one:
        before = one.getsockopt(socket.SOL_SOCKET, OPTIONS[way])
        set_buffer(one, way)
        assert one.getsockopt(socket.SOL_SOCKET, OPTIONS[way]) == before


def test_closed_connection_is_left_alone():
    one = socket.socket()
    one.close()
    set_buffer(one, "receive")
