"""The connector between engines whose blocks go through NIXL, as a whole."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from support.kv.engine_pairs import Station, prompt_of, true_text
from support.kv.p2p_ends import LOOPBACK_PEERS, SECRET
from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import TransferCause
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.nixl.connector import make_nixl
from trencadis_testing import KVConnectorConformance

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
        assert end.num_cached_tokens == 4 * NUM_BLOCKS
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
        assert end.num_cached_tokens == 4 * NUM_BLOCKS
        assert len(one.node.transport._agent._free) == 64


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_engine_without_memory_to_spare_sends_over_tcp(side: str) -> None:
    with station() as producer, station() as consumer:
        poor = producer if side == "producer" else consumer
        poor.node.transport._agent.take(64)
        end = pulled(producer, consumer, producer.prefill(PROMPT))
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert end.num_cached_tokens == 4 * NUM_BLOCKS


def test_making_a_connector_imports_no_library() -> None:
    code = (
        "import sys; import trencadis_kv.connectors.nixl.connector; from trencadis_kv.connectors.nixl import config;"
        "print(any(name.startswith('nixl') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_producer_that_dies_in_the_middle_costs_a_recomputation_and_the_memory_it_knew() -> None:
    with station(piece_bytes=96) as producer, station(piece_bytes=96) as consumer:
        params = producer.prefill(PROMPT)
        agent = producer.node.transport._agent
        write, num_writes = agent.write, iter(range(100))

        def die(*args: Any, **more: Any) -> None:
            if next(num_writes) == 2:
                raise TransferError("It died.", cause=TransferCause.UNREACHABLE)
            write(*args, **more)

        agent.write = die
        end = pulled(producer, consumer, params)
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert end.num_cached_tokens < 4 * NUM_BLOCKS
        assert consumer.count("transfer_failures", cause="unreachable") == 1
        assert consumer.node.transport._agent.num_lost == 2
        assert len(consumer.node.transport._agent._free) == 62


def test_bytes_that_are_wrong_are_refused_piece_by_piece() -> None:
    with station(piece_bytes=96) as producer, station(piece_bytes=96) as consumer:
        params = producer.prefill(PROMPT)
        agent = producer.node.transport._agent
        write, num_writes = agent.write, iter(range(100))

        def spoil(piece: int, num_bytes: int, **more: Any) -> None:
            if next(num_writes) == 1:
                agent.rows(piece)[0, 5] ^= 1
            write(piece, num_bytes, **more)

        agent.write = spoil
        end = pulled(producer, consumer, params)
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.count("transfer_failures", cause="corrupt") == 1
        assert end.num_cached_tokens == 4, "the first piece, of one block, is right"
