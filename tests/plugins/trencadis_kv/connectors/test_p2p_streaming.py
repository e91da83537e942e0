"""KV that comes in parts: by layer, or pushed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support.faultproxy import FaultProxy
from support.kv.engine_pairs import Station, prompt_of, true_text, with_port
from support.kv.p2p_ends import HASHES, NUM_BLOCKS, Producer, p2p_config, producing
from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.connector import make_p2p
from trencadis_kv.connectors.p2p.streaming import Arrivals, LayerSink, Push, Pushes
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_testing import KVConnectorConformance
from trencadis_testing.fake_pool import FakeKVCache

PROMPT = prompt_of(1, 41)
NUM_PULLED = 40
_LONG_S = 30.0
"""For steps that are to wait however slow the machine is."""


class TestP2PByLayer(KVConnectorConformance):
    """The suite of its noun; what no other engine holds is computed."""

    loads_again = False
    has_threads = True

    def make(self) -> ConnectorPair:
        """Return an engine's connector that no other knows."""
        return make_p2p(p2p_config(layerwise=True), ComponentContext(clock=SimulatedClock(), seed=0))


# ------------------------------------------------------------------------------------------------------- arrivals


@pytest.mark.parametrize(("event", "came"), [("layer", True), ("complete", True), ("incomplete", False)])
@pytest.mark.representatives(3)
def test_layer_that_comes_and_the_end_of_the_pull_end_every_wait(event: str, came: bool) -> None:
    arrivals = Arrivals((0, 1))
    happen = (lambda: arrivals.came(1)) if event == "layer" else lambda: arrivals.end(is_complete=event == "complete")
    thread = threading.Timer(0.02, happen)
    thread.start()
    assert arrivals.wait(1, until_s=time.monotonic() + _LONG_S) == came
    thread.join()
    assert arrivals.are_all_there == (event == "complete")


def test_load_that_was_missed_once_is_never_whole_again() -> None:
    arrivals = Arrivals((0, 1))
    assert not arrivals.wait(0, until_s=0.0)
    arrivals.came(0)
    arrivals.came(1)
    assert not arrivals.are_all_there
    assert not arrivals.wait(1, until_s=0.0)


# -------------------------------------------------------------------------------------------------- on the stream


@pytest.fixture
def producer() -> Iterator[Producer]:
    """One whose blocks have three layers."""
    with producing() as one:
        arrays = [np.random.default_rng(i).integers(0, 2**60, NUM_BLOCKS * 4) for i in range(3)]
        one.node.pool = PoolAccess(FakeKVCache(arrays, block_size=4))
        yield one


def pull(producer: Producer, hashes: list[bytes], *, num_rows: int = 2) -> list[tuple[int, int, list[list[int]]]]:
    """Return layers as they are taken; layer -1 is whole blocks."""
    found: list[tuple[int, int, list[list[int]]]] = []
    assert producer.node.pool is not None
    sink = LayerSink(
        layout=producer.node.pool.layout, take=lambda layer, first, rows: found.append((layer, first, rows.tolist()))
    )
    with producer.connect() as connection:
        connection.pull(
            hashes,
            lambda first, rows: found.append((-1, first, rows.tolist())),
            num_rows=num_rows,
            timeout_s=5.0,
            by_layer=sink,
        )
    return found


def test_every_layer_of_all_blocks_comes_before_the_next_one(producer: Producer) -> None:
    found = pull(producer, HASHES)
    assert [(layer, first) for layer, first, _ in found] == [
        (layer, first) for layer in range(3) for first in (0, 2, 4)
    ]
    for layer in range(3):
        rows = [row for one, _, part in found if one == layer for row in part]
        expected = np.empty((NUM_BLOCKS, 32), np.uint8)
        assert producer.node.pool is not None
        producer.node.pool.read_layer(layer, range(NUM_BLOCKS), expected, timeout_s=1.0)
        assert rows == expected.tolist()
    assert producer.node.metrics.value("tokens_total", direction="send") == 4 * NUM_BLOCKS


def test_producer_that_cannot_sends_whole_blocks() -> None:
    with producing() as one:
        assert one.node.pool is not None
        one.node.pool.layerwise = False
        found = pull(one, HASHES)
    assert [(layer, first) for layer, first, _ in found] == [(-1, first) for first in (0, 2, 4)] or [
        layer for layer, _, _ in found
    ] == [-1] * len(found)
    assert [row for _, _, rows in found for row in rows] == one.data.tolist()


def test_prefix_of_which_a_part_is_gone_does_not_begin_to_come(producer: Producer) -> None:
    with pytest.raises(TransferError, match="6 of 7 blocks are held") as caught:
        pull(producer, [*HASHES, b"?" * 32])
    assert caught.value.cause == "lost"


# --------------------------------------------------------------------------------------------------- two engines


def consuming(*, layer_wait_s: float = _LONG_S, **config: Any) -> Station:
    return Station(layerwise=True, engine={"layer_wait_s": layer_wait_s}, **config)


def served(producer: Station, consumer: Station, params: dict[str, Any]) -> Any:
    """Serve the prompt at the consumer beside a request that decodes, which must not notice."""
    other = consumer.add((5, 6, 7), max_tokens=40)
    consumer.step()
    consumer.step()
    name = consumer.add(PROMPT, max_tokens=12, params=params)
    consumer.step()
    assert consumer.engine.num_waiting == consumer.engine.stage("transfer").transfers.layered.num_discarded, (
        "no sequence waits for remote KV"
    )

    def is_done() -> bool:
        producer.step()
        return name in consumer.ends and other in consumer.ends

    consumer.until(is_done)
    assert consumer.ends[other].token_ids.tolist() == true_text((5, 6, 7), 40)
    assert consumer.ends[other].num_preemptions == 0
    assert consumer.ends[name].token_ids.tolist() == true_text(PROMPT, 12)
    assert consumer.engine.totals.num_failed_steps == 0
    consumer.until(lambda: consumer.num_used_blocks == 0)
    return consumer.ends[name]


def test_prefix_comes_while_its_sequence_runs_and_is_given_back() -> None:
    with Station() as producer, consuming() as consumer:
        end = served(producer, consumer, producer.prefill(PROMPT))
        assert consumer.num_found(end) == NUM_PULLED
        assert end.num_preemptions == 0
        assert consumer.count("tokens", direction="load") == NUM_PULLED
        producer.until(lambda: producer.num_used_blocks == 0)
        assert producer.node.holds.ends == {"released": 1}


def test_engine_that_sends_whole_blocks_is_waited_for_as_well() -> None:
    with Station(any_thread=False) as producer, consuming() as consumer:
        params = producer.prefill(PROMPT)
        consumer.add(PROMPT, max_tokens=12, params=params)
        done = threading.Event()

        def consume() -> None:
            consumer.until(lambda: bool(consumer.ends))
            done.set()

        thread = threading.Thread(target=consume)
        thread.start()
        producer.until(done.is_set)
        thread.join()
        (end,) = consumer.ends.values()
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        assert consumer.num_found(end) == NUM_PULLED


@pytest.mark.parametrize("at", [0, 732, 2532, 4732])
@pytest.mark.parametrize(
    ("fault", "cause"), [("cut_at", "unreachable"), ("flip_at", "corrupt"), ("stall_at", "deadline")]
)
def test_fault_in_any_layer_costs_one_attempt_and_nobody_else(fault: str, at: int, cause: str) -> None:
    """One layer of a block is 168 bytes here, with its heads; ten of them are a layer."""
    wait_s = 0.05 if fault == "stall_at" else _LONG_S
    connect_timeout_s = 0.5 if (fault, at) == ("stall_at", 0) else 5.0  # nobody ever answers: all of it is waited for
    with Station() as producer, consuming(layer_wait_s=wait_s, connect_timeout_s=connect_timeout_s) as consumer:
        params = producer.prefill(PROMPT)
        with FaultProxy(producer.node.server.port) as proxy:
            proxy.to_client.set(**{fault: at})
            end = served(producer, consumer, with_port(params, proxy.port))
        assert consumer.num_found(end) == 0
        assert consumer.engine.stage("transfer").transfers.layered.num_discarded == 1
        assert (
            consumer.count("transfer_failures", cause=cause) + consumer.count("transfer_failures", cause="cancelled")
            == 1
        )
        producer.step_s = 10.0  # who cannot be told to let go does when the lease is over
        producer.until(lambda: producer.num_used_blocks == 0)


def test_request_that_is_aborted_beside_its_pull_releases_everything() -> None:
    with Station() as producer, consuming() as consumer:
        params = producer.prefill(PROMPT)
        name = consumer.add(PROMPT, max_tokens=8, params=params)
        assert consumer.engine._submit_next()
        consumer.engine.abort(name)
        consumer.until(lambda: consumer.num_used_blocks == 0)
        producer.until(lambda: producer.num_used_blocks == 0)
        assert producer.node.holds.ends == {"released": 1}


BLOCK_BYTES = 96
PUSHED = [bytes([i]) * 32 for i in range(6)]
PATIENCE_S = 60.0


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_memory_is_free_only_when_neither_side_uses_it() -> None:
    pushes = Pushes(BLOCK_BYTES)
    for first, last in (("close", "end"), ("end", "close")):
        push = pushes.open(PUSHED, block_bytes=BLOCK_BYTES)
        assert push is not None
        getattr(push, first)()
        assert pushes.num_bytes == BLOCK_BYTES, "the other may still touch it"
        getattr(push, last)()
        assert pushes.num_bytes == 0


def test_closing_cuts_what_comes_unless_all_is_there() -> None:
    cuts: list[str] = []
    for name, num_there in (("some", 1), ("all", 2)):
        push = push_of(2)
        push.begin(2, lambda name=name: cuts.append(name))  # type: ignore[misc]
        for _ in range(num_there):
            push.came()
        push.close()
        with pytest.raises(TransferError):
            push.row(0)
    assert cuts == ["some"]


def push_of(num_blocks: int) -> Push:
    push = Pushes(1 << 20).open(PUSHED[:num_blocks], block_bytes=BLOCK_BYTES)
    assert push is not None
    return push


@pytest.mark.parametrize("how", ["end", "close", "fewer", "time"])
def test_nobody_waits_for_what_does_not_come(how: str) -> None:
    push = push_of(3)
    push.begin(3, lambda: None)
    push.came()
    found: list[int] = []
    until_s = time.monotonic() + 0.05 if how == "time" else soon()
    waiter = threading.Thread(target=lambda: found.append(len(push.wait(1, until_s=until_s))))
    waiter.start()
    if how == "end":
        push.end(TransferError("broken", cause=TransferCause.UNREACHABLE))
    elif how == "close":
        push.close()
    elif how == "fewer":
        push.begin(1, lambda: None)
    waiter.join(PATIENCE_S)
    assert found == [0 if how == "close" else 1]
