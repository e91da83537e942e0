from __future__ import annotations

import socket
import threading

import attrs
import pytest

from trencadis.errors import TransferError
from trencadis.kv.handshake import Identity, greet, welcome
from trencadis.kv.stream import MAJOR, FrameStream, Hello, Message, Refuse, Welcome

PRODUCER = Identity(engine="p", compat=b"c" * 16, block_bytes=64)
CONSUMER = attrs.evolve(PRODUCER, engine="d")


def meet(producer: Identity, consumer: Identity, *, wants: str = "p") -> tuple[str, str]:
    """Return what each side has against the other; empty for nothing."""
    one, other = socket.socketpair()
    causes = ["", ""]

    def produce() -> None:
        try:
            welcome(FrameStream(one, timeout_s=5), producer)
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


@pytest.mark.parametrize("secret", ["", "between us"])
def test_engines_of_one_kind_let_each_other_in(secret: str) -> None:
    assert meet(attrs.evolve(PRODUCER, secret=secret), attrs.evolve(CONSUMER, secret=secret)) == ("", "")


@pytest.mark.parametrize("change", [{"compat": b"d" * 16}, {"block_bytes": 65}])
def test_blocks_of_another_kind_are_incompatible(change: dict[str, object]) -> None:
    assert meet(PRODUCER, attrs.evolve(CONSUMER, **change)) == ("incompatible", "incompatible")


def test_another_engine_than_the_one_that_is_meant_is_lost() -> None:
    assert meet(PRODUCER, CONSUMER, wants="its former self") == ("lost", "lost")


def test_other_secrets_are_noticed_by_who_has_one() -> None:
    mine, theirs = attrs.evolve(PRODUCER, secret="a"), attrs.evolve(CONSUMER, secret="b")
    assert meet(mine, theirs)[1] == "unreachable"
    assert meet(mine, CONSUMER)[0] != ""
    assert meet(PRODUCER, theirs)[1] == "unreachable"


def test_consumer_without_the_secret_is_not_let_in_by_a_guess() -> None:
    """It skips its own check of the producer, and sends a proof made with another secret."""
    one, other = socket.socketpair()
    with one, other:
        stream = FrameStream(other, timeout_s=5)

        def ask() -> None:
            greeting = attrs.evolve(CONSUMER, secret="guess")
            stream.send(Hello(major=MAJOR, minor=0, compat=greeting.compat, block_bytes=64, wants="p", nonce=b"n" * 16))
            stream.receive()
            from trencadis.kv.stream import Proof

            stream.send(Proof(proof=b"guess" * 6))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        with pytest.raises(TransferError, match="does not know the secret"):
            welcome(FrameStream(one, timeout_s=5), attrs.evolve(PRODUCER, secret="s"))
        thread.join(60)
        assert isinstance(stream.receive(), Refuse)


def test_another_major_version_is_refused_with_both_numbers() -> None:
    one, other = socket.socketpair()
    with one, other:
        FrameStream(one, timeout_s=5).send(
            Hello(major=MAJOR + 1, minor=0, compat=b"", block_bytes=0, wants="p", nonce=b"")
        )
        with pytest.raises(TransferError) as caught:
            welcome(FrameStream(other, timeout_s=5), PRODUCER)
        assert caught.value.cause == "incompatible"
        answer = FrameStream(one, timeout_s=5).receive()
        assert isinstance(answer, Refuse)
        assert f"version {MAJOR + 1}" in answer.reason


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (Welcome(engine="another", nonce=b"", proof=b""), "lost"),
        (Refuse(cause="a word of tomorrow", reason="?"), "unreachable"),
        (Hello(major=1, minor=0, compat=b"", block_bytes=0, wants="", nonce=b""), "corrupt"),
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
