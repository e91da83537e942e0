"""KV blocks through NIXL: the transport, and the connector over it."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from support.kv.engine_pairs import Station, prompt_of, true_text
from support.kv.nixl_peer import NixlPeer, small_config
from support.kv.p2p_ends import LOOPBACK_PEERS, SECRET
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigError, TransferError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import TransferCause
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.nixl.connector import make_nixl
from trencadis_testing import KVConnectorConformance

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


pytest.importorskip("nixl_cu12", reason='nixl is not installed: pip install "trencadis[nixl]"')

PROMPT = prompt_of(1, 41)
NUM_BLOCKS = 10
LOOPBACK = {"transports": "tcp", "devices": "lo", "secret": SECRET, "peers": LOOPBACK_PEERS}


def station(*, any_thread: bool = True, **config: Any) -> Station:
    return Station(any_thread=any_thread, make=lambda context: make_nixl(NixlConfig(**LOOPBACK, **config), context))


def pulled(producer: Station, consumer: Station, params: dict[str, Any]) -> Any:
    name = consumer.add(PROMPT, max_tokens=12, params=params)

    def is_done() -> bool:
        producer.step()
        return name in consumer.ends

    consumer.until(is_done)
    return consumer.ends[name]


class TestNixl(KVConnectorConformance):
    """It keeps nothing for itself: what another engine holds is all that it loads."""

    loads_again = False
    has_threads = True

    def make(self) -> ConnectorPair:
        """Return an engine's connector that no other knows."""
        return make_nixl(NixlConfig(**LOOPBACK), ComponentContext(clock=SimulatedClock(), seed=0))


@pytest.mark.parametrize("any_thread", [True, False])
@pytest.mark.parametrize("piece_bytes", [96, 1 << 20])
def test_prefix_goes_from_one_engine_to_the_other_and_is_given_back(any_thread: bool, piece_bytes: int) -> None:
    with (
        station(any_thread=any_thread, piece_bytes=piece_bytes) as producer,
        station(any_thread=any_thread, piece_bytes=piece_bytes) as consumer,
    ):
        assert consumer.pair.scheduler.metrics().count('connector="nixl"')
        written: list[int] = []
        agent = producer.node.transport._agent
        write = agent.write
        agent.write = lambda piece, num_bytes, **more: (written.append(num_bytes), write(piece, num_bytes, **more))
        end = pulled(producer, consumer, producer.prefill(PROMPT))
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.num_found(end) == 4 * NUM_BLOCKS
        assert sum(written) == NUM_BLOCKS * producer.node.block_bytes, "the bytes went another way"
        producer.until(lambda: not producer.engine.has_work)
        assert producer.num_used_blocks == consumer.num_used_blocks == 0
        assert producer.node.holds.ends == {"released": 1}
        for one in (producer, consumer):
            assert len(one.node.transport._agent._free) == 64, "a piece is lost"


@pytest.mark.parametrize("nixl_produces", [True, False])
def test_engines_with_and_without_it_understand_each_other(nixl_produces: bool) -> None:
    with station() as one, Station() as other:
        producer, consumer = (one, other) if nixl_produces else (other, one)
        end = pulled(producer, consumer, producer.prefill(PROMPT))
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.num_found(end) == 4 * NUM_BLOCKS
        assert len(one.node.transport._agent._free) == 64


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_engine_without_memory_to_spare_sends_over_tcp(side: str) -> None:
    with station() as producer, station() as consumer:
        poor = producer if side == "producer" else consumer
        poor.node.transport._agent.take(64)
        end = pulled(producer, consumer, producer.prefill(PROMPT))
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.num_found(end) == 4 * NUM_BLOCKS


def test_making_a_connector_imports_no_library() -> None:
    code = (
        "import sys; import trencadis_kv.connectors.nixl.connector; from trencadis_kv.connectors.nixl import config;"
        "print(any(name.startswith('nixl') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
