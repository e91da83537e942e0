from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from support.faultproxy import FaultProxy
from support.kv.p2p_ends import HASHES, NUM_BLOCKS, Producer, p2p_config, producing
from trencadis.clock import SimulatedClock
from trencadis.records import ConnectorReport
from trencadis_kv.connectors.p2p import worker as p2p_worker
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.worker import LoadOrder, P2PWorker, Work
from trencadis_kv.store.pace import LoadPace
from trencadis_testing.fake_pool import FakeKVCache


class Consumer:
    """A worker side with an empty pool."""

    def __init__(self, **config: Any) -> None:
        self.node = Node(p2p_config(**config), clock=SimulatedClock(), model="m")
        self.array = np.zeros(10 * 4, np.int64)
        self.worker = P2PWorker(self.node)
        pool = FakeKVCache([self.array], block_size=4)
        self.worker.register(pool)
        self.node.start(pool.layout)

    def begin(self, *loads: LoadOrder, cancels: tuple[int, ...] = ()) -> None:
        self.worker.begin_step(msgspec.msgpack.encode(Work(loads=list(loads), cancels=list(cancels))))
        self.worker.end_step()

    def until(self, done: Callable[[ConnectorReport], Any]) -> ConnectorReport:
        until_s = time.monotonic() + 60
        while not done(report := self.worker.poll()):
            assert time.monotonic() < until_s, "it never happens"
            threading.Event().wait(0.001)
        return report

    def rows(self, blocks: list[int]) -> list[list[int]]:
        return self.array.view(np.uint8).reshape(10, 32)[blocks].tolist()


def order(producer: Producer, transfer_id: int, blocks: list[int], **changes: Any) -> LoadOrder:
    prefix = producer.prefix
    given: dict[str, Any] = {
        "transfer_id": transfer_id,
        "engine": prefix.engine,
        "name": prefix.hold_id,
        "host": prefix.host,
        "port": prefix.port,
        "lease_s": prefix.lease_s,
        "blocks": blocks,
        "hashes": HASHES[: len(blocks)],
    }
    return LoadOrder(**{**given, **changes})


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    one = Consumer(pull_timeout_s=2.0)
    yield one
    one.worker.close()


@pytest.fixture
def producer() -> Iterator[Producer]:
    with producing() as one:
        yield one


def test_failure_says_what_is_good_and_why_not_more(consumer: Consumer, producer: Producer) -> None:
    hashes = [*HASHES[:2], b"?" * 32]
    consumer.begin(order(producer, 5, [9, 2, 4], hashes=hashes))
    (failed,) = consumer.until(lambda report: report.failed).failed
    assert (failed.transfer_id, failed.num_valid_tokens) == (5, 8)
    assert failed.cause.startswith("lost: ")
    assert consumer.rows([9, 2]) == producer.data[:2].tolist()
    consumer.begin(cancels=(5,))  # by an engine that has not seen the report yet
    assert [consumer.worker.poll().released for _ in range(2)] == [(5,), ()]


def test_cancelled_pull_is_released_and_touches_nothing_afterwards(consumer: Consumer, producer: Producer) -> None:
    with FaultProxy(producer.node.server.port) as proxy:
        proxy.to_client.set(stall_at=400)
        consumer.begin(order(producer, 5, [0, 1, 2, 3, 4, 5], port=proxy.port))
        assert proxy.to_client.happened.wait(60)
        consumer.begin(cancels=(5,))
        report = consumer.until(lambda one: one.released)
        assert (report.loaded, report.failed, report.released) == ((), (), (5,))
        consumer.array[:] = 7
        proxy.to_client.set()
    assert (consumer.array == 7).all()


def test_pull_that_waits_for_a_thread_asks_for_patience(producer: Producer) -> None:
    consumer = Consumer(num_pull_threads=1, pull_timeout_s=600.0)
    with FaultProxy(producer.node.server.port) as proxy:
        proxy.to_client.set(stall_at=400)
        producer.node.holds.add(2, "other", dict(zip(HASHES, range(NUM_BLOCKS), strict=True)), num_bytes=1)
        hold = producer.node.holds._by_name["other"]
        until_s = hold.expires_s
        waits = order(producer, 2, [1], lease_s=0.01, name="other")
        consumer.begin(order(producer, 1, [0, 2, 3, 4, 5, 6], port=proxy.port), waits)
        proxy.to_client.happened.wait(60)
        producer.clock.advance(20)
        consumer.until(lambda _: hold.expires_s >= until_s + 20)
        consumer.begin(cancels=(1,))
        proxy.to_client.set()
        consumer.until(lambda report: 2 in report.loaded)
    consumer.worker.close()


def test_close_in_mid_pull_ends_soon_and_touches_nothing(producer: Producer) -> None:
    consumer = Consumer(pull_timeout_s=60.0)
    with FaultProxy(producer.node.server.port) as proxy:
        proxy.to_client.set(stall_at=300)
        consumer.begin(order(producer, 5, list(range(NUM_BLOCKS)), port=proxy.port))
        assert proxy.to_client.happened.wait(60)
        start_s = time.monotonic()
        consumer.worker.close()
        assert time.monotonic() - start_s < 30
        consumer.array[:] = 7
        proxy.to_client.set()
    consumer.worker.close()
    assert (consumer.array == 7).all()


def test_pool_that_raises_fails_the_load_and_nothing_else(
    consumer: Consumer, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    consumer.begin(order(producer, 5, [99]))
    (failed,) = consumer.until(lambda report: report.failed).failed
    assert (failed.num_valid_tokens, failed.cause[:7]) == (0, "raised:")
    assert caplog.records
    consumer.begin(order(producer, 6, [1]))
    consumer.until(lambda report: report.failed or report.loaded)


def load_s(consumer: Consumer) -> float:
    """Return what pulling all blocks is predicted to take; nan: nobody knows."""
    return consumer.node.cost.load_s(NUM_BLOCKS * 32, call_bytes=1 << 20)


@pytest.mark.parametrize(
    ("compute_s", "teaches"), [("given up", True), (1e-9, True), (1e9, False), (None, False)], ids=str
)
@pytest.mark.representatives(4)
def test_pull_that_is_given_up_teaches_and_one_that_is_cancelled_if_computing_would_have_been_quicker(
    producer: Producer, compute_s: Any, teaches: bool
) -> None:
    """A client that leaves says nothing of the way; an engine that had enough does."""
    consumer = Consumer(pull_timeout_s=0.2 if compute_s == "given up" else 60.0)
    if isinstance(compute_s, float):
        consumer.node.cost.computed(num_tokens=NUM_BLOCKS * 4 * 100, seconds=compute_s * 100)
    with FaultProxy(producer.node.server.port) as proxy:
        proxy.to_client.set(stall_at=250)
        consumer.begin(order(producer, 5, list(range(NUM_BLOCKS)), port=proxy.port))
        assert proxy.to_client.happened.wait(60)
        if compute_s == "given up":
            (failed,) = consumer.until(lambda report: report.failed).failed
            assert failed.cause.startswith("deadline: ")
        else:
            consumer.begin(cancels=(5,))
            consumer.until(lambda report: report.released)
    assert math.isnan(load_s(consumer)) is not teaches
    assert not load_s(consumer) <= 0.2 or compute_s != "given up"
    consumer.worker.close()


def resting(consumer: Consumer, seconds: float) -> list[float]:
    """Let each pull of a consumer rest so long behind each batch; returns what was done then."""
    calls: list[float] = []
    load = consumer.node.pace.load

    def slow(num_tokens: int, *, wait_s: float) -> LoadPace:
        pace = load(num_tokens, wait_s=wait_s)
        pace.rest_s = lambda done: calls.append(done) or seconds  # type: ignore[func-returns-value, method-assign]
        return pace

    consumer.node.pace.load = slow  # type: ignore[method-assign]
    return calls


def test_pull_that_rests_ends_when_it_is_cancelled(consumer: Consumer, producer: Producer) -> None:
    """Its rest is an hour: who waited for the end of it would wait for the test's end."""
    calls = resting(consumer, 3600.0)
    consumer.begin(order(producer, 5, [0, 1, 2]))
    consumer.until(lambda _: calls)
    consumer.begin(cancels=(5,))
    assert consumer.until(lambda report: report.released).released == (5,)


def test_rests_are_no_part_of_what_a_pull_takes(
    consumer: Consumer, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_worker, "TAKEN_BYTES", 1)
    measured: list[float] = []
    consumer.node.cost.loaded = lambda *, num_bytes, seconds: measured.append(seconds)  # type: ignore[method-assign]
    calls = resting(consumer, 0.3)
    since_s = time.monotonic()
    consumer.begin(order(producer, 5, [0, 1, 2]))
    consumer.until(lambda report: report.loaded)
    assert calls == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert measured[0] <= time.monotonic() - since_s - 0.9


def test_pulls_that_ended_slow_nobody_down(consumer: Consumer, producer: Producer) -> None:
    assert not consumer.node.pace.is_needed, "these blocks do not lie in host memory"
    consumer.node.pace.is_needed = True
    consumer.node.pace.stepped(device_s=1e6)
    alone = consumer.node.pace.rest_ratio
    assert alone == pytest.approx(39.0)
    with FaultProxy(producer.node.server.port) as proxy:
        proxy.to_client.set(stall_at=400)
        consumer.begin(order(producer, 5, [0, 1, 2], port=proxy.port))
        assert proxy.to_client.happened.wait(60)
        assert consumer.worker._pulls[5].gives_way
        other = consumer.node.pace.load(4, wait_s=1.0)
        other.begin()
        assert consumer.node.pace.rest_ratio == pytest.approx(79.0)
        other.end()
        consumer.begin(cancels=(5,))
        consumer.until(lambda report: report.released)
    assert consumer.node.pace.rest_ratio == alone
