from __future__ import annotations

import socket
import threading
from functools import partial

import attrs
import pytest

from trencadis.errors import TransferError
from trencadis_kv.wire.handshake import Identity, accept, greet
from trencadis_kv.wire.stream import VERSION, FrameStream, Hello, Message, Refuse, Welcome

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


def test_engines_of_one_kind_let_each_other_in() -> None:
    assert meet(PRODUCER, CONSUMER) == ("", "")


def test_engine_without_a_secret_is_none() -> None:
    with pytest.raises(ValueError, match="secret"):
        attrs.evolve(PRODUCER, secret="")


@pytest.mark.parametrize("change", [{"compat": b"d" * 16}, {"block_bytes": 65}])
def test_blocks_of_another_kind_are_incompatible(change: dict[str, object]) -> None:
    assert meet(PRODUCER, attrs.evolve(CONSUMER, **change)) == ("incompatible", "incompatible")


def test_another_engine_than_the_one_that_is_meant_is_lost() -> None:
    assert meet(PRODUCER, CONSUMER, wants="its former self") == ("lost", "lost")


def test_engine_that_knows_another_secret_is_noticed_on_both_sides() -> None:
    assert meet(PRODUCER, attrs.evolve(CONSUMER, secret="b")) == ("unreachable", "unreachable")


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
