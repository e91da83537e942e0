from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from support.eventually import eventually
from support.faultproxy import FaultProxy
from support.kv.p2p_ends import HASHES, NUM_BLOCKS, Producer, p2p_config, producing
from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.interfaces import KVPool
from trencadis.records import KVLayout, KVPart
from trencadis_kv.connectors.p2p import peer as p2p_peer
from trencadis_kv.connectors.p2p import server as p2p_server
from trencadis_kv.connectors.p2p import transport as p2p_transport
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.transport import SharedMemory, shared_memory
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.format import pack_header
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_kv.wire.handshake import accept
from trencadis_kv.wire.stream import (
    VERSION,
    Abort,
    Ack,
    Commit,
    FrameStream,
    Hello,
    Message,
    PrefillRequest,
    Pull,
    Welcome,
    block_head,
)
from trencadis_testing.connector_harness import hashes_of


@pytest.fixture
def producer() -> Iterator[Producer]:
    with producing() as one:
        yield one


class Exhausted(socket.socket):
    """A listening socket of a process that is out of descriptors for a while."""

    num_failures_left = 3

    def accept(self):  # type: ignore[no-untyped-def]
        if self.num_failures_left:
            self.num_failures_left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_engines_are_served_after_a_shortage_of_descriptors_which_the_log_says_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(address: tuple[str, int], *, family: int) -> socket.socket:
        listener = Exhausted(family)
        listener.bind(address)
        listener.listen()
        return listener

    monkeypatch.setattr(p2p_server, "_PAUSE_S", 0.01)
    monkeypatch.setattr(socket, "create_server", exhausted)
    with producing() as producer:
        for _ in range(3):
            assert producer.pull(HASHES).tolist() == producer.data.tolist()
    (line,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert "Too many open files" in line
    assert "ulimit -n" in line


def test_strangers_cost_no_memory_and_keep_no_engine_out() -> None:
    """Each announces 16 MiB with nine bytes, or says nothing, and stays."""
    with producing(connect_timeout_s=60.0, max_connections=4) as producer, contextlib.ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        address = ("127.0.0.1", producer.node.server.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(100)]
        loud = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
        for stranger in loud:
            stranger.sendall(struct.pack("<IHH", 16 << 20, 1, 0) + b"x")
        assert producer.pull(HASHES).tolist() == producer.data.tolist()
        for stranger in (silent[0], *loud):  # the oldest makes room
            stranger.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert tracemalloc.get_traced_memory()[1] < 8 << 20


def test_nothing_is_computed_or_told_for_who_does_not_know_the_secret(producer: Producer) -> None:
    stranger = attrs.evolve(producer.me, secret="a guess")
    with pytest.raises(TransferError, match="does not know the secret"):
        PeerConnection(producer.prefix, stranger, connect_timeout_s=20.0)
    connection, stream = producer.raw()
    hello = Hello(version=VERSION, compat=producer.me.compat, block_bytes=32, wants="", nonce=bytes(16))
    asked = PrefillRequest(tokens=bytes(64), tenant="ann", cache_salt="", timeout_s=9.0)
    with connection:
        stream.send(hello)
        assert isinstance(stream.receive(), Welcome)
        stream.send(asked)  # where the proof belongs
        with pytest.raises(TransferError):
            stream.receive()
    assert producer.node.remote_prefills.num_remote_prefills == 0


class PoolOfViews(KVPool):
    """Large blocks in host memory that nobody may copy."""

    def __init__(self) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, 4 * 4096), np.uint8)

    @property
    def layout(self) -> KVLayout:
        part = KVPart(layer=0, kind="key", num_heads=4, head_dim=256, dtype="float32", item_bytes=4)
        return KVLayout(parts=(part,), block_size=4, last_head=4, numerics="test")

    def read_blocks(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        raise AssertionError("it was copied")

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        raise AssertionError("it was written to")

    def view_blocks(self, blocks: Sequence[int]) -> list[list[memoryview]]:
        return [[self.data[block, :5000].data, self.data[block, 5000:].data] for block in blocks]


def test_blocks_of_few_pieces_are_sent_from_where_they_lie() -> None:
    pool = PoolOfViews()
    node = Node(p2p_config(), clock=SimulatedClock(), model="m")
    node.pool = PoolAccess(pool)
    node.start(pool.layout)
    node.holds.add(1, "held", dict(zip(HASHES, range(NUM_BLOCKS), strict=True)), num_bytes=1)
    prefix = RemotePrefix(
        engine=node.engine, hold_id="held", host="127.0.0.1", port=node.server.port, num_tokens=24, lease_s=30.0
    )
    assert node.identity is not None
    rows: list[NDArray[np.uint8]] = []
    with PeerConnection(prefix, node.identity, connect_timeout_s=5.0) as connection:
        connection.pull(HASHES[::-1], lambda _, some: rows.append(some.copy()), num_rows=4, timeout_s=5.0)
    node.close()
    assert np.array_equal(np.concatenate(rows), pool.data[::-1])


def test_connection_too_many_is_turned_away_in_words() -> None:
    with producing(max_connections=1) as producer, producer.connect() as connection:
        assert connection.renew(timeout_s=20), "it is known there"
        with pytest.raises(TransferError, match="as many engines as it may") as caught:
            producer.connect()
        assert caught.value.cause == "unreachable"
        assert connection.renew(timeout_s=5)
        connection.close()
        eventually(lambda: not producer.node.server._threads)
        producer.connect().close()


def test_who_says_nothing_is_shown_the_door() -> None:
    with producing(connect_timeout_s=0.05) as producer, producer.raw()[0] as connection:
        connection.settimeout(5)
        assert connection.recv(1) == b""


def test_noise_harms_nobody(producer: Producer) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000):
        connection, _ = producer.raw()
        with connection:
            connection.settimeout(5)
            with contextlib.suppress(OSError):  # it may be cut at any word
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(100):
                    pass
    assert producer.pull(HASHES).tolist() == producer.data.tolist()


def test_close_cuts_everybody_and_ends_every_thread() -> None:
    with producing() as producer:
        connection = producer.connect()
        producer.node.server.close()
        producer.node.server.close()
        with connection, pytest.raises(TransferError):
            connection.renew(timeout_s=5)
        assert not producer.node.server._threads
        with pytest.raises(TransferError):
            producer.connect()


def test_server_without_a_cache_says_so() -> None:
    with producing() as producer:
        producer.node.pool = None
        with pytest.raises(TransferError, match="no KV cache") as caught:
            producer.pull(HASHES)
        assert caught.value.cause == "lost"
        assert producer.node.holds.open("held", lambda: None).num_bytes // 32 == NUM_BLOCKS


class Turned(IdentityCodec):
    """Sends bytes backwards, with a mark behind them."""

    flags = 200
    max_growth_bytes = 5

    def encode(self, payload: memoryview, header: bytes) -> bytes:
        return bytes(payload)[::-1] + header[52:57]

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        if bytes(data[-5:]) != header[52:57] or len(data) != len(out) + 5:
            raise TransferError("That is another block.", cause="corrupt")
        out[:] = bytes(data[:-5])[::-1]


def test_blocks_travel_as_the_codec_makes_them_and_engines_of_other_codecs_refuse_each_other() -> None:
    with producing(codec=Turned()) as producer, producing() as plain:
        assert producer.pull(HASHES).tolist() == producer.data.tolist()
        assert producer.node.metrics.value("bytes_total", direction="send") == NUM_BLOCKS * (128 + 32 + 5)
        with pytest.raises(TransferError, match="kv_codec") as refused:
            PeerConnection(producer.prefix, plain.me, connect_timeout_s=5.0)
        assert refused.value.cause == "incompatible"


@pytest.mark.parametrize("num_rows", [1, 4, 6, 100])
def test_blocks_come_as_they_are_held(producer: Producer, num_rows: int) -> None:
    assert producer.pull(HASHES, num_rows=num_rows).tolist() == producer.data.tolist()


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


def test_release_and_renewal_say_whether_there_is_anything(producer: Producer) -> None:
    with producer.connect() as connection:
        assert connection.renew(timeout_s=5)
        assert connection.release(timeout_s=5)
        assert not connection.renew(timeout_s=5)
        assert not connection.release(timeout_s=5)
    assert producer.node.holds.take_free() == (1,)


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
