from __future__ import annotations

import numpy as np
import pytest

from support.kv.store_parts import BLOCK_BYTES, GatedStore, hashes_of, make_parts, make_pool, read
from trencadis.errors import TransferError
from trencadis.records import ConnectorReport
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


def test_what_was_saved_is_loaded(house):
    content = read(house.pool, [3, 4])
    house.step(saves=[SaveOrder([3, 4], hashes_of(3, 4))])
    report = house.step(loads=[LoadOrder(1, [8, 9], hashes_of(3, 4))])
    assert report.loaded == (1,)
    assert (read(house.pool, [8, 9]) == content).all()


def test_block_that_is_saved_and_loaded_into_in_one_step_is_saved_first(house):
    old, new = read(house.pool, [3]), np.full((1, BLOCK_BYTES), 7, np.uint8)
    house.pool.write_blocks([5], new)
    house.step(saves=[SaveOrder([5], hashes_of(5))])
    house.step(saves=[SaveOrder([3], hashes_of(3))], loads=[LoadOrder(1, [3], hashes_of(5))])
    assert (read(house.pool, [3]) == new).all()
    house.step(loads=[LoadOrder(2, [9], hashes_of(3))])
    assert (read(house.pool, [9]) == old).all()


def test_load_and_its_cancellation_in_one_message_leave_the_load_of_another_transfer_id(house):
    house.step(saves=[SaveOrder([3], hashes_of(3))])
    report = house.step(loads=[LoadOrder(2, [9], hashes_of(3))], cancels=[1])
    assert (report.loaded, report.released) == ((2,), (1,))


def test_transfer_id_that_is_ordered_and_cancelled_before_a_step_is_released_and_not_loaded(house):
    before = read(house.pool, [9])
    house.step(saves=[SaveOrder([3], hashes_of(3))])
    report = house.step(loads=[LoadOrder(1, [9], hashes_of(3))], cancels=[1])
    assert (report.loaded, report.failed, report.released) == ((), (), (1,))
    assert (read(house.pool, [9]) == before).all()


def test_empty_message_does_nothing(house):
    house.worker.begin_step(b"")
    assert house.worker.poll() == ConnectorReport()


def test_message_that_is_none_is_refused(house):
    with pytest.raises(TransferError, match="cannot be read"):
        house.worker.begin_step(b"nonsense")


def test_worker_without_a_cache_has_nothing_to_report_or_close():
    worker = StoreWorker(make_parts(), Staging(1))
    worker.begin_step(b"")
    assert worker.poll() == ConnectorReport()
    worker.close()


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
    house.begin(saves=[SaveOrder([3, 4], hashes_of(3, 4))])
    assert house.worker.wants_layers
    for layer in (0, 1):
        assert house.worker.wait_layer(layer, budget_s=0.0)
        house.pool.write_layer(layer, [3, 4], np.zeros((2, BLOCK_BYTES // 2), np.uint8))
    assert (house.stored([3, 4]) == old).all()
    assert not house.worker.wants_layers


@pytest.mark.parametrize(
    ("settings", "expects"), [({}, False), ({"layerwise_saves": False}, True)], ids=["not told", "not wanted"]
)
def test_blocks_are_copied_at_once_otherwise(make_house, settings, expects):
    house = make_house(**settings)
    old = read(house.pool, [3, 4])
    house.begin(saves=[SaveOrder([3, 4], hashes_of(3, 4))], expects=expects)
    assert not house.worker.wants_layers
    house.pool.write_blocks([3, 4], np.zeros((2, BLOCK_BYTES), np.uint8))
    assert (house.stored([3, 4]) == old).all()


def test_expectation_is_that_of_one_step(make_house):
    house = make_house()
    house.begin()
    house.worker.end_step()
    house.begin(saves=[SaveOrder([3], hashes_of(3))], expects=False)
    assert not house.worker.wants_layers


def test_expectation_ends_with_a_message_that_is_none(make_house):
    house = make_house()
    house.worker.expect_layers()
    with pytest.raises(TransferError, match="cannot be read"):
        house.worker.begin_step(b"nonsense")
    house.begin(saves=[SaveOrder([3], hashes_of(3))], expects=False)
    assert not house.worker.wants_layers


def test_block_that_is_loaded_into_in_the_same_step_is_copied_at_once(make_house):
    house = make_house()
    old = read(house.pool, [3])
    house.begin(saves=[SaveOrder([3], hashes_of(3))], loads=[LoadOrder(1, [3], hashes_of(15))])
    assert not house.worker.wants_layers
    assert (house.stored([3]) == old).all()


def test_load_into_other_blocks_lets_layers_be_copied_late(make_house):
    house = make_house()
    house.begin(saves=[SaveOrder([3], hashes_of(3))], loads=[LoadOrder(1, [4], hashes_of(15))])
    assert house.worker.wants_layers


def test_step_without_saves_wants_no_layers(make_house):
    house = make_house()
    house.begin()
    assert not house.worker.wants_layers


def test_worker_without_a_cache_wants_no_layers():
    worker = StoreWorker(make_parts(layerwise_saves=True), Staging(1))
    worker.expect_layers()
    worker.begin_step(b"")
    assert not worker.wants_layers
    assert worker.wait_layer(0, budget_s=0.0)
    worker.end_step()
    worker.close()
