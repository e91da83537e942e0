from __future__ import annotations

import threading
import time

import msgspec
import pytest

from support.kv.nixl_peer import NixlPeer, small_config
from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause

pytest.importorskip("nixl_cu12", reason='nixl is not installed: pip install "trencadis[nixl]"')

from trencadis_kv.connectors.nixl.connector import NixlTransport

BLOCK_BYTES = 1 << 16


@pytest.fixture
def transport():
    one = NixlTransport(small_config(piece_bytes=2 * BLOCK_BYTES))
    one.open(BLOCK_BYTES)
    yield one
    one.close()


def test_blocks_of_another_process_land_piece_by_piece(transport):
    receive_buffer = transport.receive_buffer()
    receive_buffer.rows(0)[:] = receive_buffer.rows(1)[:] = 7
    with NixlPeer("write", BLOCK_BYTES) as peer:
        peer.say(receive_buffer.target.hex())
        assert peer.read() == "done"
    assert (receive_buffer.rows(0)[0] == 1).all()
    assert (receive_buffer.rows(0)[1:] == 7).all()
    assert (receive_buffer.rows(1) == 7).all()
    receive_buffer.is_quiet = True
    receive_buffer.close()


def test_landing_knows_its_pieces(transport):
    receive_buffer = transport.receive_buffer()
    assert [receive_buffer.holds(index, rows) for index, rows in ((0, 2), (1, 1))] == [True, True]
    assert [receive_buffer.holds(index, rows) for index, rows in ((0, 3), (2, 1), (-1, 1))] == [False, False, False]
    receive_buffer.is_quiet = True
    receive_buffer.close()


def test_memory_of_a_quiet_landing_is_lent_again_and_that_of_another_is_not(transport):
    receive_buffers = [transport.receive_buffer() for _ in range(4)]
    assert transport.receive_buffer() is None, "eight pieces are five receive_buffers"
    receive_buffers[0].is_quiet = True
    receive_buffers[0].close()
    receive_buffers[0].close()
    again = transport.receive_buffer()
    assert again is not None
    receive_buffers[1].close()  # its producer may still write
    assert transport.receive_buffer() is None


def test_agent_whose_memory_may_be_written_to_is_replaced_and_late_bytes_reach_nobody(transport):
    first = transport._agent
    kept, *lost = [transport.receive_buffer() for _ in range(3)]
    target = lost[0].target.hex()
    for receive_buffer in lost:
        receive_buffer.close()
    until_s = time.monotonic() + 20.0
    while transport._agent in (None, first) and time.monotonic() < until_s:
        time.sleep(0.001)
    assert transport._agent is not first
    assert transport._agent.name != first.name
    fresh = transport.receive_buffer()
    fresh.rows(0)[:] = 7
    kept.rows(0)[:] = 3  # memory that is lent is not given up
    kept.is_quiet = True
    kept.close()
    assert first._agent is None, "nobody uses it, and it is still there"
    with NixlPeer("write", BLOCK_BYTES) as peer:
        peer.say(target)
        assert peer.read() in {"unreachable", "deadline"}
    assert (fresh.rows(0) == 7).all()
    fresh.is_quiet = True
    fresh.close()


def test_closed_transport_lends_nothing_and_lives_until_its_last_user(transport):
    receive_buffer, agent = transport.receive_buffer(), transport._agent
    transport.close()
    transport.close()
    assert transport.receive_buffer() is None
    receive_buffer.rows(0)[:] = 1
    receive_buffer.is_quiet = True
    receive_buffer.close()
    assert agent._agent is None


@pytest.mark.parametrize(
    "target",
    [b"", b"\xc1", msgspec.msgpack.encode([b"m", [], 1, BLOCK_BYTES]), msgspec.msgpack.encode([b"m", [1], 1, 8])],
)
def test_target_that_is_none_is_refused(transport, target):
    with pytest.raises(TransferError) as caught:
        transport.flight(target)
    assert caught.value.cause == TransferCause.CORRUPT


def test_agent_that_does_not_exist_is_unreachable_and_costs_no_memory(transport):
    target = msgspec.msgpack.encode([b"nonsense", [4096], 1, BLOCK_BYTES])
    for _ in range(20):
        with transport.flight(target) as flight, pytest.raises(TransferError) as caught:
            flight.write(0, 1, timeout_s=1.0, is_gone=lambda: False)
        assert caught.value.cause == TransferCause.UNREACHABLE
    with transport.flight(target) as flight, pytest.raises(TransferError, match="no piece 1"):
        flight.write(1, 1, timeout_s=1.0, is_gone=lambda: False)
    assert len(transport._agent.take(8)) == 8


def test_library_that_does_not_start_is_an_error_that_names_the_settings(monkeypatch):
    one = NixlTransport(small_config())
    monkeypatch.setattr(one, "_start", lambda: 1 / 0)
    with pytest.raises(ConfigError, match="NIXL does not start") as caught:
        one.open(BLOCK_BYTES)
    assert "kv_connector.nixl.transports and devices" in caught.value.hint


def test_engine_that_nobody_writes_to_costs_no_processor_time(transport):
    receive_buffer = transport.receive_buffer()
    receive_buffer.is_quiet = True
    receive_buffer.close()
    start_s = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - start_s < 0.2, "a thread spins"
