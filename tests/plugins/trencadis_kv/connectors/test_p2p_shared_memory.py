"""Memory that engines of one machine lend each other: between processes, and in pulls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import attrs
import msgspec
import pytest

from support.kv.engine_pairs import Station, prompt_of, true_text
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p import connector as p2p
from trencadis_kv.connectors.p2p import transport as p2p_transport
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.transport import SharedMemory, shared_memory
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.wire.stream import FrameStream
from trencadis_kv.wire.stream_messages import Taken

PROMPT = prompt_of(1, 41)
NUM_BLOCKS = 10
BLOCK_BYTES = 1_600_000  # two rows a piece

pytestmark = pytest.mark.skipif(
    shared_memory(1) is None, reason="this system has no memory that processes can lend each other"
)

_WRITES = """
import sys
from trencadis_kv.connectors.p2p.transport import shared_memory
transport = shared_memory(1)
transport.open(int(sys.argv[1]))
with transport.flight(bytes.fromhex(sys.argv[2])) as flight:
    for piece in range(flight.num_pieces):
        flight.rows(piece)[:] = piece + 1
        flight.write(piece, 2, timeout_s=1.0, is_gone=lambda: False)
"""
_LENDS = """
import sys, time
from trencadis_kv.connectors.p2p.transport import shared_memory
transport = shared_memory(1)
transport.open(int(sys.argv[1]))
receive_buffer = transport.receive_buffer()
print(receive_buffer.target.hex(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def transport() -> Iterator[SharedMemory]:
    one = shared_memory(2)
    assert one is not None
    one.open(BLOCK_BYTES)
    yield one
    one.close()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_another_process_writes_is_there(transport: SharedMemory) -> None:
    receive_buffer = transport.receive_buffer()
    assert receive_buffer is not None
    code = [sys.executable, "-c", _WRITES, str(BLOCK_BYTES), receive_buffer.target.hex()]
    subprocess.run(code, check=True, timeout=60)
    assert receive_buffer.num_pieces == 2
    for piece in range(2):
        assert receive_buffer.rows(piece).shape == (2, BLOCK_BYTES)
        assert (receive_buffer.rows(piece) == piece + 1).all()
    receive_buffer.close()


def test_memory_outlives_the_process_that_lent_it(transport: SharedMemory) -> None:
    code = [sys.executable, "-c", _LENDS, str(BLOCK_BYTES)]
    with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdout is not None
        target = bytes.fromhex(lender.stdout.readline())
        with transport.flight(target) as flight:  # type: ignore[union-attr]
            lender.send_signal(signal.SIGKILL)
            lender.wait(60)
            flight.rows(1)[:] = 7
            assert (flight.rows(1) == 7).all()
        assert transport.flight(target) is None, "its process is gone"


def test_quiet_memory_is_lent_again_and_other_memory_is_not(transport: SharedMemory) -> None:
    receive_buffer: Any = transport.receive_buffer()
    target = receive_buffer.target
    receive_buffer.is_quiet = True
    receive_buffer.close()
    again: Any = transport.receive_buffer()
    assert again.target == target
    late: Any = transport.flight(target)
    again.close()  # somebody may still write to it
    fresh: Any = transport.receive_buffer()
    assert fresh.target != target
    fresh.rows(0)[:] = 3
    late.rows(0)[:] = 9
    assert (fresh.rows(0) == 3).all()


def test_closed_transport_keeps_nothing_open() -> None:
    before = num_open()
    one = shared_memory(2)
    assert one is not None
    one.open(BLOCK_BYTES)
    receive_buffers = [one.receive_buffer(), one.receive_buffer()]
    for receive_buffer in receive_buffers:
        assert receive_buffer is not None
        with one.flight(receive_buffer.target) as flight:  # type: ignore[union-attr]
            flight.rows(0)[:] = 1
        receive_buffer.is_quiet = True
    receive_buffers[0].close()  # type: ignore[union-attr]
    one.close()
    assert one.receive_buffer() is None
    receive_buffers[1].close()  # type: ignore[union-attr]
    del receive_buffer, receive_buffers, flight
    assert num_open() == before


def test_lent_memory_cannot_shrink(transport: SharedMemory) -> None:
    """Else a producer that writes to it would be killed."""
    receive_buffer: Any = transport.receive_buffer()
    target = msgspec.msgpack.decode(receive_buffer.target)
    with pytest.raises(PermissionError):
        os.ftruncate(target[2], 0)


@pytest.mark.representatives(7)
@pytest.mark.parametrize("other", ["machine", "process", "descriptor", "file", "key", "num_pieces", "not sealed"])
def test_memory_that_cannot_be_had_is_done_without(transport: SharedMemory, other: str) -> None:
    receive_buffer: Any = transport.receive_buffer()
    target = msgspec.msgpack.decode(receive_buffer.target, type=p2p_transport._Target)
    before = num_open()
    with tempfile.TemporaryFile() as file:
        file.truncate(target.num_bytes)
        loose = os.memfd_create("trencadis-kv", os.MFD_ALLOW_SEALING)
        os.write(loose, target.key.ljust(target.num_bytes, b"\0"))
        values = {
            "machine": {"machine": "another"},
            "process": {"process": 2**22 + 1},  # beyond the largest number that Linux gives
            "descriptor": {"descriptor": 10_000},
            "file": {"descriptor": file.fileno()},
            "key": {"key": bytes(32)},
            "num_pieces": {"num_pieces": 3},
            "not sealed": {"descriptor": loose},
        }[other]
        wrong = msgspec.structs.replace(target, **values)
        assert transport.flight(msgspec.msgpack.encode(wrong)) is None
        os.close(loose)
    assert num_open() == before
    assert transport.flight(receive_buffer.target) is not None


@pytest.mark.parametrize("target", [b"", b"\xc1", msgspec.msgpack.encode(["m", 1, 2, b"k", 2, 1, BLOCK_BYTES + 1])])
def test_target_that_is_none_is_refused(transport: SharedMemory, target: bytes) -> None:
    with pytest.raises(TransferError) as caught:
        transport.flight(target)
    assert caught.value.cause == TransferCause.CORRUPT


class Marked(IdentityCodec):
    """A codec, as far as engines can tell."""

    flags = 200


@attrs.define
class Counted:
    """How many blocks went which way."""

    over_memory: int = 0
    over_connection: int = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found, placed, received = Counted(), PeerConnection._take_placed, PeerConnection._receive_block

    def take_placed(*arguments: Any) -> int:
        number = placed(*arguments)
        found.over_memory += number
        return number

    def receive_block(*arguments: Any) -> None:
        received(*arguments)
        found.over_connection += 1

    monkeypatch.setattr(PeerConnection, "_take_placed", take_placed)
    monkeypatch.setattr(PeerConnection, "_receive_block", receive_block)
    return found


def pulled(producer: Station, consumer: Station) -> Any:
    name = consumer.add(PROMPT, max_tokens=12, params=producer.prefill(PROMPT))

    def is_done() -> bool:
        producer.step()
        return name in consumer.ends

    consumer.until(is_done)
    assert consumer.ends[name].token_ids.tolist() == true_text(PROMPT, 12)
    return consumer.ends[name]


@pytest.mark.parametrize("any_thread", [True, False])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_prefix_goes_from_one_engine_to_the_other_and_all_is_given_back(
    any_thread: bool, piece_bytes: int, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_transport, "_PIECE_BYTES", piece_bytes)
    with Station(any_thread=any_thread) as producer, Station(any_thread=any_thread) as consumer:
        for _ in range(3):
            assert consumer.num_found(pulled(producer, consumer)) == 4 * NUM_BLOCKS
            consumer.engine._state.blocks.reset_cache()
        assert counted == Counted(over_memory=3 * NUM_BLOCKS)
        num_bytes = 3 * NUM_BLOCKS * consumer.node.block_bytes
        assert consumer.count("pulled_bytes", way="shared memory") == num_bytes
        assert consumer.count("pulled_bytes", way="connection") == 0
        producer.until(lambda: not producer.engine.has_work)
        assert producer.num_used_blocks == consumer.num_used_blocks == 0
        assert producer.node.holds.ends == {"released": 3}
        assert len(consumer.node.transport._free) == 1, "the same memory is used again"


@pytest.mark.parametrize("lack", ["producer", "consumer", "system", "codec", "layerwise"])
def test_without_it_blocks_go_over_the_connection(lack: str, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    if lack == "system":
        monkeypatch.delattr(os, "memfd_create")
    if lack == "codec":
        monkeypatch.setattr(p2p, "codec_of", lambda _: Marked())
    with (
        Station(shared_memory=lack != "producer") as producer,
        Station(shared_memory=lack != "consumer", layerwise=lack == "layerwise") as consumer,
    ):
        assert consumer.num_found(pulled(producer, consumer)) == 4 * NUM_BLOCKS
        assert counted.over_memory == 0
        assert counted.over_connection >= NUM_BLOCKS
        assert consumer.count("pulled_bytes", way="connection") == NUM_BLOCKS * consumer.node.block_bytes


@pytest.mark.parametrize("wrong", ["bytes", "write fails", "gives back what was not lent"])
@pytest.mark.representatives(3)
def test_what_goes_wrong_ends_the_way_and_its_memory_is_never_used_again(
    wrong: str, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_transport, "_PIECE_BYTES", 1)
    write, number, send = p2p_transport._SharedFlight.write, iter(range(100)), FrameStream.send

    def written(self: Any, index: int, num_rows: int, **more: Any) -> None:
        if next(number) == 4:
            if wrong == "write fails":
                raise TransferError("The library took too long.", cause=TransferCause.DEADLINE)
            self.rows(index)[0, 3] ^= wrong == "bytes"
        write(self, index, num_rows, **more)

    def sent(self: FrameStream, message: Any) -> None:
        is_wrong = isinstance(message, Taken) and wrong == "gives back what was not lent"
        send(self, Taken(index=-1) if is_wrong else message)

    monkeypatch.setattr(p2p_transport._SharedFlight, "write", written)
    monkeypatch.setattr(FrameStream, "send", sent)
    with Station() as producer, Station() as consumer:
        num_found = consumer.num_found(pulled(producer, consumer))
        assert num_found == 4 * 4 if wrong != "gives back what was not lent" else num_found < 4 * NUM_BLOCKS
        assert sum(consumer.count("transfer_failures", cause=cause) for cause in TransferCause) == 1
        assert consumer.count("transfer_failures", cause="corrupt") == (wrong == "bytes")
        assert consumer.node.transport._free == []
        assert consumer.node.transport._num_left == consumer.node.config.num_pull_threads
