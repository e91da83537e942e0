from __future__ import annotations

import numpy as np
import pytest
from kv_parts import BLOCK_BYTES, GatedStore, hashes_of, make_parts, make_pool, read

from trencadis.errors import TransferError
from trencadis.kv.messages import LoadOrder, SaveOrder, StepOrders, encode_orders
from trencadis.kv.staging import Staging
from trencadis.kv.store_worker import StoreWorker
from trencadis.records import ConnectorReport
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


def test_load_and_its_cancellation_in_one_message_leave_the_load_of_another_ticket(house):
    house.step(saves=[SaveOrder([3], hashes_of(3))])
    report = house.step(loads=[LoadOrder(2, [9], hashes_of(3))], cancels=[1])
    assert (report.loaded, report.released) == ((2,), (1,))


def test_ticket_that_is_ordered_and_cancelled_before_a_step_is_released_and_not_loaded(house):
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
