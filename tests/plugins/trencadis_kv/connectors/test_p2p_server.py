from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from support.eventually import eventually
from support.kv.p2p_ends import HASHES, NUM_BLOCKS, Producer, p2p_config, producing
from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.interfaces import KVPool
from trencadis.records import KVLayout, KVPart
from trencadis_kv.connectors.p2p import server as p2p_server
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_kv.wire.stream import VERSION, Ack, Hello, PrefillRequest, Refuse, Renew, Welcome


@pytest.fixture
def producer() -> Iterator[Producer]:
    with producing() as one:
        yield one


def test_blocks_are_sent_in_the_order_that_is_asked_for(producer: Producer) -> None:
    assert producer.pull([HASHES[4], HASHES[0], HASHES[5]]).tolist() == producer.data[[4, 0, 5]].tolist()
    assert producer.node.metrics.value("bytes_total", direction="send") == 3 * (128 + 32)


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


def test_strangers_cost_no_memory_and_keep_no_engine_out(producer: Producer) -> None:
    """Each announces 16 MiB with nine bytes, and stays."""
    tracemalloc.start()
    strangers = []
    try:
        for _ in range(200):
            strangers.append(socket.create_connection(("127.0.0.1", producer.node.server.port)))
            strangers[-1].sendall(struct.pack("<IHH", 16 << 20, 1, 0) + b"x")
        assert producer.pull(HASHES).tolist() == producer.data.tolist()
        for stranger in strangers:
            stranger.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
        for stranger in strangers:
            stranger.close()


def test_silent_strangers_keep_no_engine_out() -> None:
    with producing(connect_timeout_s=60.0, max_connections=4) as producer, contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", producer.node.server.port))) for _ in range(100)
        ]
        assert producer.pull(HASHES).tolist() == producer.data.tolist()
        strangers[0].settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b"", "the oldest makes room"


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


def test_device_with_a_thread_of_its_own_is_asked_on_that_thread(producer: Producer) -> None:
    pool = producer.node.pool
    assert pool is not None
    pool._pool.any_thread = pool.any_thread = False
    ended = threading.Event()

    def serve() -> None:
        while not ended.wait(0.001):
            pool.serve(max_bytes=100)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert producer.pull(HASHES).tolist() == producer.data.tolist()
    ended.set()
    thread.join()


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


def test_many_connections_are_served_at_once(producer: Producer) -> None:
    open_ones = [producer.connect() for _ in range(8)]
    assert producer.pull(HASHES).tolist() == producer.data.tolist()
    for one in open_ones:
        assert one.renew(timeout_s=5)
        one.close()


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
    with producing(connect_timeout_s=0.05) as producer:
        connection, _ = producer.raw()
        with connection:
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


def test_question_before_the_greeting_is_no_question(producer: Producer) -> None:
    connection, stream = producer.raw()
    with connection:
        stream.send(Renew(hold_id="held"))
        with pytest.raises(TransferError):
            stream.receive()


def test_message_that_asks_for_nothing_ends_the_connection(producer: Producer) -> None:
    connection, stream = producer.raw()
    with connection:
        stream.send(
            Hello(
                version=VERSION,
                compat=producer.me.compat,
                block_bytes=32,
                wants=producer.me.engine,
                nonce=bytes(16),
            )
        )
        assert isinstance(stream.receive(), Welcome)
        stream.send(Ack(known=True))
        with pytest.raises(TransferError):
            stream.receive()


def test_another_version_is_refused(producer: Producer) -> None:
    for version, kind in ((VERSION, Welcome), (VERSION + 1, Refuse)):
        connection, stream = producer.raw()
        with connection:
            stream.send(
                Hello(
                    version=version,
                    compat=producer.me.compat,
                    block_bytes=32,
                    wants=producer.me.engine,
                    nonce=bytes(16),
                )
            )
            assert isinstance(stream.receive(), kind)


def test_reader_that_takes_longer_than_a_hold_may_last_is_cut(producer: Producer) -> None:
    """It has asked, and does not read: with blocks this small that is as good as a reader that is done."""
    with producer.connect() as connection:
        hold = producer.node.holds.open("held", connection.cut)
        producer.clock.advance(51.0)
        assert producer.node.holds.take_free() == ()
        with pytest.raises(TransferError):
            connection.renew(timeout_s=5)
        producer.node.holds.close(hold, connection.cut)
        assert producer.node.holds.take_free() == (1,)


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


def test_blocks_travel_as_the_codec_makes_them_and_arrive_as_they_were() -> None:
    with producing(codec=Turned()) as producer:
        assert producer.pull(HASHES).tolist() == producer.data.tolist()
        assert producer.node.metrics.value("bytes_total", direction="send") == NUM_BLOCKS * (128 + 32 + 5)


def test_engines_of_other_codecs_refuse_each_other_when_they_meet() -> None:
    with producing(codec=Turned()) as producer, producing() as plain:
        assert producer.me.compat != plain.me.compat
        with pytest.raises(TransferError, match="kv_codec") as refused:
            PeerConnection(producer.prefix, plain.me, connect_timeout_s=5.0)
        assert refused.value.cause == "incompatible"


def test_block_that_the_codec_does_not_know_is_corrupt() -> None:
    with producing(codec=Turned()) as producer:
        mine = attrs.evolve(producer.me, codec=Strange())
        with (
            PeerConnection(producer.prefix, mine, connect_timeout_s=5.0) as connection,
            pytest.raises(TransferError, match="cannot read") as caught,
        ):
            connection.pull(HASHES, lambda *_: None, num_rows=4, timeout_s=5.0)
        assert caught.value.cause == "corrupt"


class Strange(Turned):
    """Has another key."""

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        raise TransferError("This engine cannot read that.", cause="corrupt")
