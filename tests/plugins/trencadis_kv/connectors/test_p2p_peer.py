from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from support.faultproxy import FaultProxy
from support.kv.p2p_ends import HASHES, NUM_BLOCKS, Producer, producing
from trencadis.errors import TransferError
from trencadis_kv.connectors.p2p import peer as p2p_peer
from trencadis_kv.connectors.p2p import transport as p2p_transport
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.transport import SharedMemory, shared_memory
from trencadis_kv.store.format import pack_header
from trencadis_kv.wire.handshake import accept
from trencadis_kv.wire.stream import Abort, Ack, Commit, FrameStream, Message, Pull, block_head
from trencadis_testing.connector_harness import hashes_of


@pytest.fixture
def producer() -> Iterator[Producer]:
    with producing() as one:
        yield one


@pytest.mark.parametrize("num_rows", [1, 4, 6, 100])
def test_blocks_come_as_they_are_held(producer: Producer, num_rows: int) -> None:
    assert producer.pull(HASHES, num_rows=num_rows).tolist() == producer.data.tolist()


def test_nothing_is_nothing(producer: Producer) -> None:
    assert producer.pull([]).shape == (0, 32)


def test_part_that_is_held_is_taken_and_the_rest_is_lost(producer: Producer) -> None:
    taken: list[np.ndarray] = []
    with producer.connect() as connection, pytest.raises(TransferError, match="holds 2 of 4") as caught:
        connection.pull(
            [*HASHES[:2], *hashes_of([77]), HASHES[3]],
            lambda _, rows: taken.append(rows.copy()),
            num_rows=1,
            timeout_s=5,
        )
    assert caught.value.cause == "lost"
    assert np.concatenate(taken).tolist() == producer.data[:2].tolist()


class Rested:
    """Notes how many blocks were read at the producer, and how many were taken here, whenever it rests, and behind each that is taken.

    Args:
        producer: Whose blocks.
        seconds: It is to rest as long whenever it may; 0: it only gives way.
    """

    gives_way = True

    def __init__(self, producer: Producer, *, seconds: float = 0.02) -> None:
        pool = producer.node.pool
        assert pool is not None
        self.num_read = self.num_taken = 0
        self._seconds = seconds
        self.noted: list[tuple[int, int]] = []
        self.noted_taken: list[tuple[int, int]] = []
        self._read, pool.read = pool.read, self.read  # type: ignore[method-assign]

    def read(self, blocks: Sequence[int], out: NDArray[np.uint8], **more: Any) -> None:
        self.num_read += len(blocks)
        self._read(blocks, out, **more)

    def take(self, first: int, rows: NDArray[np.uint8]) -> None:
        assert first == self.num_taken
        time.sleep(0.02)
        self.num_taken += len(rows)
        self.noted_taken.append((self.num_read, self.num_taken))

    def due_s(self) -> float:
        return self._seconds

    def rest(self, seconds: float) -> None:
        assert seconds == self._seconds > 0.0
        time.sleep(seconds)
        self.noted.append((self.num_read, self.num_taken))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    """Return memory of this machine in two pieces of a block each; who rests waits long enough for one that is being written."""
    monkeypatch.setattr(p2p_transport, "_PIECE_BYTES", 32)
    monkeypatch.setattr(p2p_transport, "_NUM_PIECES", 2)
    monkeypatch.setattr(p2p_peer, "_NEXT_S", 0.2)
    transport = shared_memory(1)
    if transport is None:
        pytest.skip("this system has no memory that processes can lend each other")
    return transport


@pytest.mark.parametrize("is_lost", [False, True])
def test_no_piece_is_written_while_the_consumer_rests(small_pieces: SharedMemory, is_lost: bool) -> None:
    """It would have to be fetched from memory behind the rest. Who is given less than was asked for still gets all pieces back."""
    with producing(transport=small_pieces) as producer, producer.connect() as connection:
        rested, receive_buffer = Rested(producer), small_pieces.receive_buffer()
        assert receive_buffer is not None
        lost = pytest.raises(TransferError, match="holds 5 of 6") if is_lost else contextlib.nullcontext()
        hashes = [*HASHES[:5], *hashes_of([77])] if is_lost else HASHES
        with lost:
            connection.pull(
                hashes, rested.take, num_rows=1, timeout_s=30.0, receive_buffer=receive_buffer, throttle=rested
            )
        assert receive_buffer.is_quiet
        receive_buffer.close()
    assert rested.noted == [(2, 2), (3, 3), (4, 4), (5, 5)]
    assert rested.num_taken == (5 if is_lost else 6)


@pytest.mark.parametrize("gives_way", [True, False])
def test_ends_take_turns_where_a_pull_gives_way(small_pieces: SharedMemory, gives_way: bool) -> None:
    """Else the producer writes a piece while another one is taken. The first two pieces are its own in both cases."""
    with producing(transport=small_pieces) as producer, producer.connect() as connection:
        noted, receive_buffer = Rested(producer, seconds=0.0), small_pieces.receive_buffer()
        noted.gives_way = gives_way
        assert receive_buffer is not None
        connection.pull(HASHES, noted.take, num_rows=1, timeout_s=30.0, receive_buffer=receive_buffer, throttle=noted)
        receive_buffer.close()
    ahead = [num_read - num_taken for num_read, num_taken in noted.noted_taken]
    assert any(ahead[1:]) == (not gives_way)
    assert noted.noted == []


def test_blocks_of_a_connection_rest_between_two_batches(producer: Producer) -> None:
    rested = Rested(producer)
    with producer.connect() as connection:
        connection.pull(HASHES, rested.take, num_rows=2, timeout_s=30.0, throttle=rested)
    assert [taken for _, taken in rested.noted] == [2, 4, 6]


def test_hold_id_that_is_not_held_is_lost(producer: Producer) -> None:
    with pytest.raises(TransferError) as caught:
        producer.pull(HASHES, hold_id="another")
    assert caught.value.cause == "lost"


def test_release_and_renewal_say_whether_there_is_anything(producer: Producer) -> None:
    with producer.connect() as connection:
        assert connection.renew(timeout_s=5)
        assert connection.release(timeout_s=5)
        assert not connection.renew(timeout_s=5)
        assert not connection.release(timeout_s=5)
    assert producer.node.holds.take_free() == (1,)


def test_nobody_at_home_is_unreachable() -> None:
    with producing() as producer:
        pass
    with pytest.raises(TransferError, match="No engine answers") as caught:
        producer.connect()
    assert caught.value.cause == "unreachable"


@pytest.mark.parametrize("byte", range(110, 110 + 8 + 128 + 32, 7))
def test_no_flipped_byte_goes_unnoticed(producer: Producer, byte: int) -> None:
    """From the frame's head to the end of the first block's payload, whatever is hit."""
    taken: list[np.ndarray] = []
    with FaultProxy(producer.node.server.port) as proxy:
        welcome_bytes = _bytes_of_welcome(producer)
        proxy.to_client.set(flip_at=welcome_bytes + byte - 110)
        with producer.connect(port=proxy.port) as connection, pytest.raises(TransferError) as caught:
            connection.pull(HASHES, lambda _, rows: taken.append(rows.copy()), num_rows=1, timeout_s=0.2)
    assert caught.value.cause in ("corrupt", "incompatible", "deadline")
    assert taken == []


def _bytes_of_welcome(producer: Producer) -> int:
    with FaultProxy(producer.node.server.port) as proxy, producer.connect(port=proxy.port):
        proxy.to_server.happened.wait(0.01)
        return proxy.to_client.num_bytes


def _scripted(producer: Producer, answers: list[Message | list[bytes]]) -> tuple[PeerConnection, Callable[[], None]]:
    """Return a connection to a producer that answers a pull as it is told."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, listener:
            stream = FrameStream(connection, timeout_s=5)
            accept(stream, producer.me)
            stream.receive()
            for answer in answers:
                stream.send_pieces(answer) if isinstance(answer, list) else stream.send(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    prefix = attrs.evolve(producer.prefix, port=listener.getsockname()[1])
    return PeerConnection(prefix, producer.me, connect_timeout_s=5), lambda: thread.join(60)


def _block(producer: Producer, index: int, *, data: bytes | None = None) -> list[bytes]:
    payload = producer.data[index].tobytes() if data is None else data
    pool = producer.node.pool
    assert pool is not None
    header = pack_header(pool.layout, compat=producer.me.compat, block_hash=HASHES[index], payload=payload)
    return [block_head(header, len(payload)), payload]


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (lambda p: [_block(p, 1), Commit(num_blocks=1)], "corrupt"),
        (lambda p: [_block(p, 0, data=b"x" * 33)], "corrupt"),
        (lambda p: [_block(p, 0), _block(p, 1), _block(p, 2), Commit(num_blocks=3)], "corrupt"),
        (lambda p: [_block(p, 0), Commit(num_blocks=2)], "corrupt"),
        (lambda p: [_block(p, 0), Commit(num_blocks=1)], "lost"),
        (lambda p: [_block(p, 0), Ack(known=True)], "corrupt"),
        (lambda p: [_block(p, 0), Abort(cause="full", reason="?")], "full"),
        (lambda p: [_block(p, 0), Abort(cause="a word of tomorrow", reason="?")], "unreachable"),
        (lambda p: [_block(p, 0), Pull(hold_id="", hashes=[])], "corrupt"),
        (lambda p: [_block(p, 0)], "unreachable"),
    ],
    ids=[
        "another block",
        "longer block",
        "more blocks",
        "wrong number",
        "fewer blocks",
        "odd message",
        "abort",
        "unknown cause",
        "question",
        "silence",
    ],
)
def test_lying_producer_is_not_believed(
    producer: Producer, script: Callable[[Producer], list[Message | list[bytes]]], cause: str
) -> None:
    connection, join = _scripted(producer, script(producer))
    with connection, pytest.raises(TransferError) as caught:
        connection.pull(HASHES[:2], lambda *_: None, num_rows=1, timeout_s=5)
    join()
    assert caught.value.cause == cause


def test_answer_that_is_no_acknowledgement_is_corrupt(producer: Producer) -> None:
    connection, join = _scripted(producer, [Commit(num_blocks=0)])
    with connection, pytest.raises(TransferError) as caught:
        connection.renew(timeout_s=5)
    join()
    assert caught.value.cause == "corrupt"
    assert len(HASHES) == NUM_BLOCKS
