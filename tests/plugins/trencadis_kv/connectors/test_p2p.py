"""The connector between engines, as a whole: the suite of its noun, and prefixes that go from one engine to another."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from support.faultproxy import FaultProxy
from support.kv.engine_pairs import PREFILL, Station, pause, prompt_of, true_text, with_port
from support.kv.p2p_ends import p2p_config
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.nixl.connector import make_nixl
from trencadis_kv.connectors.p2p.config import P2PConfig
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


@pytest.mark.parametrize(("name", "make", "config"), [("p2p", make_p2p, P2PConfig), ("nixl", make_nixl, NixlConfig)])
def test_engine_that_would_close_it_refuses_to_start(name: str, make: Any, config: type[P2PConfig]) -> None:
    context = ComponentContext(clock=SimulatedClock(), seed=0, quarantine_s=20.0)
    with pytest.raises(
        ConfigValueError, match=rf"^\[kv_connector.{name}\] max_hold_s = 50.0: .*release_timeout_s = 20.0,"
    ):
        make(config(), context)


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


def test_prefix_goes_from_one_engine_to_the_other_and_is_given_back(pair: tuple[Station, Station]) -> None:
    producer, consumer = pair
    params = producer.prefill(PROMPT)
    assert producer.node.holds.num_holds == 1
    end = pulled(producer, consumer, params)
    assert end.token_ids.tolist() == true_text(PROMPT, 12)
    assert (end.num_cached_tokens, consumer.num_found(end)) == (0, 4 * NUM_BLOCKS), "it was not cached before"
    assert consumer.count("tokens", direction="load") == 4 * NUM_BLOCKS
    producer.until(lambda: not producer.engine.has_work)
    assert producer.num_used_blocks == consumer.num_used_blocks == 0
    assert producer.node.holds.ends == {"released": 1}


def test_only_what_is_not_there_is_pulled(pair: tuple[Station, Station]) -> None:
    producer, consumer = pair
    consumer.serve(PROMPT[:18], max_tokens=1)
    end = pulled(producer, consumer, producer.prefill(PROMPT))
    assert end.token_ids.tolist() == true_text(PROMPT, 12)
    assert (end.num_cached_tokens, consumer.num_found(end)) == (16, 4 * NUM_BLOCKS)
    assert consumer.count("tokens", direction="load") == 4 * (NUM_BLOCKS - 4)


def test_prefix_that_is_there_already_is_given_back_at_once(pair: tuple[Station, Station]) -> None:
    producer, consumer = pair
    consumer.serve(PROMPT, max_tokens=1)
    assert pulled(producer, consumer, producer.prefill(PROMPT)).token_ids.tolist() == true_text(PROMPT, 12)
    assert consumer.count("tokens", direction="load") == 0
    producer.until(lambda: not producer.engine.has_work)
    assert producer.node.holds.ends == {"released": 1}


def test_request_without_parameters_is_served_as_ever() -> None:
    with Station() as station:
        end = station.serve(PROMPT, max_tokens=8)
    assert (end.token_ids.tolist(), end.transfer_params) == (true_text(PROMPT, 8), None)


def test_lease_ends_by_itself() -> None:
    with Station(lease_s=5.0) as producer:
        producer.prefill(PROMPT)
        assert producer.num_used_blocks >= NUM_BLOCKS
        start_s = producer.clock.now_s()
        producer.until(lambda: producer.num_used_blocks == 0)
        assert 4.9 <= producer.clock.now_s() - start_s <= 5.2
        assert producer.node.holds.ends == {"expired": 1}


def test_held_blocks_are_not_given_to_others() -> None:
    with Station(num_blocks=30) as producer, Station() as consumer:
        params = producer.prefill(PROMPT)
        for seed in range(2, 8):
            producer.serve(prompt_of(seed, 60), max_tokens=8)
        end = pulled(producer, consumer, params)
        assert consumer.num_found(end) == 4 * NUM_BLOCKS
        assert end.token_ids.tolist() == true_text(PROMPT, 12)


def test_more_than_may_be_held_is_not_held() -> None:
    with Station(max_held_bytes=100) as producer:
        end = producer.serve(PROMPT, max_tokens=1, params=PREFILL)
        assert (end.transfer_params, producer.num_used_blocks) == (None, 0)
        assert producer.node.holds.ends == {"refused": 1}


def test_hold_that_was_lost_costs_a_recomputation() -> None:
    with Station(lease_s=1.0) as producer, Station() as consumer:
        params = producer.prefill(PROMPT)
        producer.until(lambda: producer.num_used_blocks == 0)
        end = pulled(producer, consumer, params)
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.count("transfer_failures", cause="lost") == 1


def test_engine_that_was_started_anew_is_not_taken_for_the_old_one() -> None:
    with Station() as old:
        params, port = old.prefill(PROMPT), old.node.server.port
    with Station(port=port) as new, Station() as consumer:
        assert new.prefill(PROMPT)["remote_engine_id"] != params["remote_engine_id"]
        end = pulled(new, consumer, params)
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.count("transfer_failures", cause="lost") == 1
        assert consumer.num_found(end) == 0


def test_blocks_of_another_kind_are_refused_and_the_engine_is_not_asked_again() -> None:
    with Station() as producer, Station() as consumer:
        consumer.node._model = "another model"
        consumer.node.server.close()
        consumer.node.server.__init__(
            consumer.node.config,
            consumer.node.holds,
            consumer.node.metrics,
            remote_prefills=consumer.node.remote_prefills,
            cost=consumer.node.cost,
        )
        consumer.node.start(consumer.node.pool.layout)
        end = pulled(producer, consumer, producer.prefill(PROMPT))
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.count("transfer_failures", cause="incompatible") == 1
        other = prompt_of(9, 41)
        assert consumer.serve(other, max_tokens=4, params=producer.prefill(other)).token_ids.tolist() == true_text(
            other, 4
        )
        assert consumer.count("transfer_failures", cause="incompatible") == 1
        assert consumer.count("lookups", result="declined") == 1


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


def test_request_that_is_given_up_before_it_is_looked_up_lets_the_producer_go() -> None:
    with Station() as producer, Station() as consumer:
        name = consumer.add(PROMPT, max_tokens=8, params=producer.prefill(PROMPT))
        consumer.engine.abort(name)
        producer.until(lambda: producer.num_used_blocks == 0)
        assert producer.node.holds.ends == {"released": 1}


def test_request_that_is_refused_lets_the_producer_go() -> None:
    from trencadis.errors import PromptTooLongError

    with Station() as producer, Station(num_blocks=8) as consumer:
        with pytest.raises(PromptTooLongError):
            consumer.add(PROMPT, max_tokens=8, params=producer.prefill(PROMPT))
        producer.until(lambda: producer.num_used_blocks == 0)
        assert producer.node.holds.ends == {"released": 1}


def test_prefill_that_is_aborted_holds_nothing() -> None:
    with Station() as producer:
        name = producer.add(PROMPT, max_tokens=50, params=PREFILL)
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


def test_strange_host_is_never_connected_to() -> None:
    with Station() as producer, Station(peers=("10.0.0.0/8:*",)) as consumer:
        end = consumer.serve(PROMPT, max_tokens=6, params=producer.prefill(PROMPT))
        assert end.token_ids.tolist() == true_text(PROMPT, 6)
        assert consumer.count("lookups", result="declined") == 1


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


@pytest.mark.parametrize(("mine", "theirs", "num_found"), [("a" * 16, "a" * 16, 40), ("a" * 16, "b" * 16, 0)])
def test_secret_must_be_the_same(mine: str, theirs: str, num_found: int) -> None:
    with Station(secret=mine) as producer, Station(secret=theirs) as consumer:
        end = pulled(producer, consumer, producer.prefill(PROMPT))
        assert (consumer.num_found(end), end.token_ids.tolist()) == (num_found, true_text(PROMPT, 12))


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


def test_metrics_show_what_happened() -> None:
    with Station() as producer, Station() as consumer:
        pulled(producer, consumer, producer.prefill(PROMPT))
        pause()
        text = consumer.engine.metrics()
        assert 'trencadis_kv_lookups_total{connector="p2p",result="hit"} 1.0' in text
        assert 'trencadis_kv_tokens_total{connector="p2p",direction="load"} 40.0' in text
        assert 'trencadis_kv_bytes_total{connector="p2p",direction="send"} 2240.0' in producer.engine.metrics()


def test_config_is_frozen() -> None:
    assert attrs.fields_dict(P2PConfig)["secret"].metadata["secret"] is True
