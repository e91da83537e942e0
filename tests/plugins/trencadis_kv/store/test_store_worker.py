from __future__ import annotations

import msgspec
import numpy as np
import pytest

from support.kv.store_parts import BLOCK_BYTES, GatedStore, hashes_of, make_parts, make_pool, read
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.store.bounded import RecentHashes
from trencadis_kv.store.counters import TransferCounters
from trencadis_kv.store.journal import IndexStore, Journal, KeyIndex, repeat
from trencadis_kv.store.messages import LoadOrder, SaveOrder, StepOrders, encode_orders
from trencadis_kv.store.staging import Staging
from trencadis_kv.store.store_worker import StoreWorker
from trencadis_testing.kv_faults import DictStore


class House:
    def __init__(self, *, gated=False, **settings):
        self.objects = {}
        self.store = GatedStore(self.objects) if gated else DictStore(self.objects)
        self.parts = make_parts(lambda: self.store, **settings)
        self.pool = make_pool()
        self.worker = StoreWorker(self.parts, Staging(100 * BLOCK_BYTES))
        self.worker.register(self.pool)

    def step(self, **orders):
        self.worker.begin_step(encode_orders(StepOrders(**orders)))
        self.worker.end_step()
        assert self.worker.wait_idle(60.0)
        return self.worker.poll()


@pytest.fixture
def house():
    one = House()
    yield one
    one.worker.close()


def test_block_that_is_saved_and_loaded_into_in_one_step_is_saved_first(house):
    old, new = read(house.pool, [3]), np.full((1, BLOCK_BYTES), 7, np.uint8)
    house.pool.write_blocks([5], new)
    house.step(saves=[SaveOrder([5], hashes_of(5))])
    house.step(saves=[SaveOrder([3], hashes_of(3))], loads=[LoadOrder(1, [3], hashes_of(5))])
    assert (read(house.pool, [3]) == new).all()
    house.step(loads=[LoadOrder(2, [9], hashes_of(3))])
    assert (read(house.pool, [9]) == old).all()


def test_transfer_id_that_is_ordered_and_cancelled_before_a_step_is_released_and_not_loaded(house):
    before = read(house.pool, [9])
    house.step(saves=[SaveOrder([3], hashes_of(3))])
    report = house.step(loads=[LoadOrder(1, [9], hashes_of(3))], cancels=[1])
    assert (report.loaded, report.failed, report.released) == ((), (), (1,))
    assert (read(house.pool, [9]) == before).all()


def test_message_that_is_none_is_refused(house):
    with pytest.raises(TransferError, match="cannot be read"):
        house.worker.begin_step(b"nonsense")


def test_waiting_for_threads_has_an_end():
    one = House(gated=True, close_timeout_s=0.05)
    one.worker.begin_step(encode_orders(StepOrders(loads=[LoadOrder(1, [9], hashes_of(3))])))
    assert one.store.is_waiting.wait(60.0)
    assert not one.worker.wait_idle(0.0)
    one.worker.close()
    one.worker.close()
    assert one.worker.wait_idle(60.0)


# -------------------------------------------------------------------------------------------------- by layer
class LayerHouse(House):
    """The thread that would copy ahead is kept busy."""

    def __init__(self, **settings):
        super().__init__(gated=True, **{"layerwise_saves": True, **settings})
        self.begin(saves=[SaveOrder([15], hashes_of(15))], expects=False)
        self.worker.end_step()
        assert self.store.is_waiting.wait(60.0)

    def begin(self, *, expects=True, **orders):
        if expects:
            self.worker.expect_layers()
        self.worker.begin_step(encode_orders(StepOrders(**orders)))

    def stored(self, blocks):
        """Return what is stored of the blocks, by loading it to others."""
        self.worker.end_step()
        self.store.open()
        assert self.worker.wait_idle(60.0)
        report = self.step(loads=[LoadOrder(99, [10, 11][: len(blocks)], hashes_of(*blocks))])
        return read(self.pool, [10, 11][: len(blocks)]) if report.loaded else None


@pytest.fixture
def make_house():
    made = []

    def make(**settings):
        made.append(LayerHouse(**settings))
        return made[-1]

    yield make
    for one in made:
        one.store.open()
        one.worker.close()


def test_layers_are_copied_while_the_step_is_computed(make_house):
    house = make_house()
    old = read(house.pool, [3, 4])
    house.begin(saves=[SaveOrder([3, 4], hashes_of(3, 4))], loads=[LoadOrder(1, [5], hashes_of(15))])
    assert house.worker.wants_layers
    for layer in (0, 1):
        assert house.worker.wait_layer(layer, budget_s=0.0)
        house.pool.write_layer(layer, [3, 4], np.zeros((2, BLOCK_BYTES // 2), np.uint8))
    assert (house.stored([3, 4]) == old).all()
    assert not house.worker.wants_layers


@pytest.mark.parametrize(
    ("settings", "expects", "loads"),
    [({}, False, []), ({"layerwise_saves": False}, True, []), ({}, True, [LoadOrder(1, [3], hashes_of(15))])],
    ids=["not told", "not wanted", "loaded into"],
)
@pytest.mark.representatives(3)
def test_blocks_are_copied_at_once_otherwise(make_house, settings, expects, loads):
    house = make_house(**settings)
    house.begin()  # an expectation is that of one step
    house.worker.end_step()
    old = read(house.pool, [3, 4])
    house.begin(saves=[SaveOrder([3, 4], hashes_of(3, 4))], loads=loads, expects=expects)
    assert not house.worker.wants_layers
    house.pool.write_blocks([3, 4], np.zeros((2, BLOCK_BYTES), np.uint8))
    assert (house.stored([3, 4]) == old).all()


def test_worker_without_a_cache_wants_no_layers():
    worker = StoreWorker(make_parts(layerwise_saves=True), Staging(1))
    worker.expect_layers()
    worker.begin_step(b"")
    assert not worker.wants_layers
    assert worker.wait_layer(0, budget_s=0.0)
    worker.end_step()
    worker.close()


def test_calls_are_repeated_in_order_and_once():
    journal, counters, recent, index = Journal(), TransferCounters("shelf"), RecentHashes(9), KeyIndex()
    recent.add([b"a", b"b"])
    journal.of("counters").failed(TransferCause.CORRUPT)
    journal.of("counters").moved("load", num_tokens=8, num_bytes=100)
    journal.of("recent").discard([b"b"])
    for call in ("add", "remove", "add"):
        getattr(journal.of("index"), call)("kv1/rank0/a")
    journal.of("index").add("kv1/rank1/a")
    (message,) = journal.take()
    assert journal.take() == ()
    state = {"counters": counters, "recent": recent, "index": index}
    repeat(message, state, is_first=True)
    assert counters.value("transfer_failures_total", cause="corrupt") == 1
    assert counters.value("tokens_total", direction="load") == 8
    assert recent.unknown([b"a", b"b"]) == [1]
    assert IndexStore(index).contains(["kv1/rank0/a", "kv1/rank1/a", "kv1/rank2/a"]) == 2
    index.clear("kv1/rank0/")
    assert IndexStore(index).contains(["kv1/rank0/a"]) == 0


def test_tokens_and_durations_count_on_the_first_rank_and_bytes_on_each():
    counters = TransferCounters("shelf")
    for rank in range(3):
        journal = Journal()
        journal.of("counters").moved("save", num_tokens=4, num_bytes=10)
        journal.of("counters").ended(0.5)
        repeat(*journal.take(), {"counters": counters}, is_first=rank == 0)
    assert counters.value("tokens_total", direction="save") == 4
    assert counters.value("bytes_total", direction="save") == 30
    assert counters.value("load_seconds_count") == 1


def test_a_long_list_of_calls_comes_in_several_messages():
    journal, index = Journal(), KeyIndex()
    for number in range(10_000):
        journal.of("index").add(str(number))
    messages = [*journal.take(), *journal.take(), *journal.take()]
    assert len(messages) == 2
    for message in messages:
        repeat(message, {"index": index}, is_first=True)
    assert "9999" in index


def test_only_what_is_known_is_recorded_and_repeated():
    with pytest.raises(AttributeError, match=r"counters\.text is not known"):
        Journal().of("counters").text()
    for message in (
        b"nonsense",
        msgspec.msgpack.encode([("index", "__init__", [], {})]),
        msgspec.msgpack.encode([("x", "y", [], {})]),
    ):
        with pytest.raises(TransferError):
            repeat(message, {"index": KeyIndex()}, is_first=True)


def test_a_breaker_that_is_elsewhere_lets_everything_through():
    assert Journal().of("breaker").allows
