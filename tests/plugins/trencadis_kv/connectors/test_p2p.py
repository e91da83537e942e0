"""The connector between engines, as a whole: the suite of its noun, and prefixes that go from one engine to another."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.faultproxy import FaultProxy
from support.kv.engine_pairs import PREFILL, Station, prompt_of, true_text, with_port
from support.kv.p2p_ends import p2p_config
from trencadis.clock import SimulatedClock
from trencadis.errors import PromptTooLongError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.p2p.connector import make_p2p
from trencadis_testing import KVConnectorConformance

PROMPT = prompt_of(1, 41)
NUM_BLOCKS = 10


class TestP2P(KVConnectorConformance):
    """It keeps nothing for itself: what another engine holds is all that it loads."""

    loads_again = False
    has_threads = True

    def make(self) -> ConnectorPair:
        """Return an engine's connector that no other knows."""
        return make_p2p(p2p_config(), ComponentContext(clock=SimulatedClock(), seed=0))


@pytest.fixture(params=[True, False], ids=["any thread", "one thread"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Station, Station]]:
    with Station(any_thread=request.param) as producer, Station(any_thread=request.param) as consumer:
        yield producer, consumer


def pulled(producer: Station, consumer: Station, params: dict[str, Any], *, max_tokens: int = 12) -> Any:
    """Serve the prompt at the consumer while the producer steps, too."""
    name = consumer.add(PROMPT, max_tokens=max_tokens, params=params)

    def is_done() -> bool:
        producer.step()
        return name in consumer.ends

    consumer.until(is_done)
    return consumer.ends[name]


@pytest.mark.parametrize(("num_here", "num_cached"), [(0, 0), (18, 16), (41, 40)])
@pytest.mark.representatives(3)
def test_what_is_not_there_goes_from_one_engine_to_the_other_and_is_given_back(
    pair: tuple[Station, Station], num_here: int, num_cached: int
) -> None:
    producer, consumer = pair
    if num_here:
        consumer.serve(PROMPT[:num_here], max_tokens=1)
    params = producer.prefill(PROMPT)
    assert producer.node.holds.num_holds == 1
    end = pulled(producer, consumer, params)
    assert end.token_ids.tolist() == true_text(PROMPT, 12)
    assert (end.num_cached_tokens, consumer.num_found(end)) == (num_cached, 4 * NUM_BLOCKS)
    assert consumer.count("tokens", direction="load") == 4 * NUM_BLOCKS - num_cached
    producer.until(lambda: not producer.engine.has_work)
    assert producer.num_used_blocks == consumer.num_used_blocks == 0
    assert producer.node.holds.ends == {"released": 1}


def test_lease_ends_by_itself_whatever_the_wall_clock_says_and_costs_a_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(0)
    for name, unit in (("time", 1), ("time_ns", 10**9)):
        monkeypatch.setattr(time, name, lambda unit=unit: rng.randrange(10**9) * unit)
    with Station(lease_s=5.0) as producer, Station() as consumer:
        params = producer.prefill(PROMPT)
        assert producer.num_used_blocks >= NUM_BLOCKS
        start_s = producer.clock.now_s()
        producer.until(lambda: producer.num_used_blocks == 0)
        assert 4.9 <= producer.clock.now_s() - start_s <= 5.2
        assert producer.node.holds.ends == {"expired": 1}
        assert pulled(producer, consumer, params).token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.count("transfer_failures", cause="lost") == 1


def test_engine_that_was_started_anew_is_not_taken_for_the_old_one() -> None:
    with Station() as old:
        params, port = old.prefill(PROMPT), old.node.server.port
    with Station(port=port) as new, Station() as consumer:
        assert new.prefill(PROMPT)["remote_engine_id"] != params["remote_engine_id"]
        end = pulled(new, consumer, params)
        assert (end.token_ids.tolist(), consumer.num_found(end)) == (true_text(PROMPT, 12), 0)
        assert consumer.count("transfer_failures", cause="lost") == 1


def test_held_blocks_are_not_given_to_others() -> None:
    with Station(num_blocks=30) as producer, Station() as consumer:
        params = producer.prefill(PROMPT)
        for seed in range(2, 8):
            producer.serve(prompt_of(seed, 60), max_tokens=8)
        end = pulled(producer, consumer, params)
        assert consumer.num_found(end) == 4 * NUM_BLOCKS
        assert end.token_ids.tolist() == true_text(PROMPT, 12)


@pytest.mark.parametrize(
    ("fault", "cause", "num_blocks"),
    [
        ({"cut_at": 700}, "unreachable", 2),
        ({"flip_at": 700}, "corrupt", 2),
        ({"stall_at": 700}, "deadline", 2),
        ({"cut_at": 0}, "unreachable", 0),
        ({"flip_at": 3}, "corrupt", 0),
    ],
)
def test_fault_on_the_way_costs_what_did_not_come(fault: dict[str, int], cause: str, num_blocks: int) -> None:
    """A block is 96 bytes here, 232 with its heads: what was verified before the fault is used."""
    timeouts = {"pull_timeout_s": 0.3, "connect_timeout_s": 0.3}
    with Station() as producer, Station(shared_memory=False, **timeouts) as consumer:
        params = producer.prefill(PROMPT)
        producer.step_s = consumer.step_s = (
            1e-5  # the connector's own time-out, which is real, comes before the engine's
        )
        with FaultProxy(producer.node.server.port) as proxy:
            proxy.to_client.set(**fault)
            end = pulled(producer, consumer, with_port(params, proxy.port))
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.count("transfer_failures", cause=cause) == 1
        assert consumer.num_found(end) == 4 * num_blocks
        assert consumer.num_used_blocks == 0


def test_request_that_is_given_up_while_it_is_pulled_releases_everything() -> None:
    with Station() as producer, Station() as consumer:
        params = producer.prefill(PROMPT)
        with FaultProxy(producer.node.server.port) as proxy:
            proxy.to_client.set(stall_at=700)
            name = consumer.add(PROMPT, max_tokens=8, params=with_port(params, proxy.port))
            consumer.until(proxy.to_client.happened.is_set)
            consumer.engine.abort(name)
            proxy.to_client.set()
            consumer.until(lambda: consumer.num_used_blocks == 0)
            producer.until(lambda: producer.num_used_blocks == 0)
        assert producer.node.holds.ends == {"released": 1}


def test_request_that_is_refused_lets_the_producer_go_and_a_prefill_that_is_aborted_holds_nothing() -> None:
    with Station() as producer, Station(num_blocks=8) as consumer:
        with pytest.raises(PromptTooLongError):
            consumer.add(PROMPT, max_tokens=8, params=producer.prefill(PROMPT))
        producer.until(lambda: producer.num_used_blocks == 0)
        assert producer.node.holds.ends == {"released": 1}
        name = producer.add(prompt_of(2, 41), max_tokens=50, params=PREFILL)
        producer.until(lambda: producer.engine.num_running == 1)
        producer.step()
        producer.engine.abort(name)
        assert (producer.num_used_blocks, producer.node.holds.num_holds) == (0, 0)


def test_dead_engine_costs_one_connection() -> None:
    with Station() as producer:
        params = producer.prefill(PROMPT)
    with Station() as consumer:
        for seed in (1, 2):
            prompt = prompt_of(seed, 41)
            assert consumer.serve(prompt, max_tokens=6, params=params).token_ids.tolist() == true_text(prompt, 6)
        assert consumer.count("transfer_failures", cause="unreachable") == 1
        assert consumer.count("lookups", result="declined") == 1
        consumer.clock.advance(6.0)
        assert consumer.num_found(consumer.serve(prompt_of(3, 41), max_tokens=6, params=params)) == 0
        assert consumer.count("transfer_failures", cause="unreachable") == 2


def test_request_cannot_make_an_engine_connect_to_another_port_than_the_named_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as victim, Station() as producer:
        address = f"127.0.0.1:{producer.node.server.port}"
        with Station(peers=(address,)) as consumer:
            params = producer.prefill(PROMPT)
            for host in ("127.0.0.1", "localhost", "127.1", "::ffff:127.0.0.1", "0.0.0.0", "127.0.0.1."):
                elsewhere = {**params, "remote_host": host, "remote_port": victim.getsockname()[1]}
                consumer.serve(PROMPT, max_tokens=6, params=elsewhere)
                consumer.pair.scheduler.on_rejected(elsewhere)
            assert consumer.count("lookups", result="declined") == 6
            assert pulled(producer, consumer, producer.prefill(PROMPT)).token_ids.tolist() == true_text(PROMPT, 12)
        victim.settimeout(0.0)  # the consumer is closed, and with it everything that it had begun
        with pytest.raises(BlockingIOError):
            victim.accept()


def test_many_prefixes_at_once_under_pressure() -> None:
    """Loads, holds, evictions and preemptions side by side: every text is right, and every block comes back."""
    prompts = [prompt_of(seed, 20 + seed % 5 * 9) for seed in range(14)]
    with Station(num_blocks=250) as producer, Station(num_blocks=40, num_pull_threads=2) as consumer:
        todo = [(prompt, producer.prefill(prompt)) for prompt in prompts]
        names = {consumer.add(prompt, max_tokens=9, params=params): prompt for prompt, params in todo}

        def is_done() -> bool:
            producer.step()
            return len(consumer.ends) == len(names)

        consumer.until(is_done)
        for name, prompt in names.items():
            assert consumer.ends[name].token_ids.tolist() == true_text(prompt, 9), name
        assert consumer.count("tokens", direction="load") > 0
        producer.until(lambda: producer.num_used_blocks == 0)
        consumer.until(lambda: consumer.num_used_blocks == 0)
