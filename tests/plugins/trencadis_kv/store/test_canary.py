from __future__ import annotations

import threading

import pytest

from support.kv.store_parts import GatedStore, make_parts, make_pool
from trencadis.errors import TransferError
from trencadis_kv.store.breaker import BreakerState
from trencadis_kv.store.canary import Canary
from trencadis_kv.store.canary import try_store as try_alone
from trencadis_testing.kv_faults import DictStore, Fault, Faults, FaultyStore


def try_store(make_store, **settings):
    parts = make_parts(make_store, **settings)
    parts.breaker.open()
    canary = Canary(parts, parts.stored([make_pool().layout]))
    client = parts.client()
    canary.run(client)
    client.close()
    return canary.wait(0.0), parts


def faulty(objects, fault):
    faults = Faults()
    faults.begin(fault)
    return lambda: FaultyStore(DictStore(objects), faults)


def test_store_that_works_is_used_and_left_with_a_description_alone():
    objects = {}
    error, parts = try_store(lambda: DictStore(objects))
    assert error is None
    assert parts.breaker.state is BreakerState.CLOSED
    assert [key.rsplit("/", 1)[1] for key in objects] == ["layout"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault.REFUSES, "unreachable"),
        (Fault.RAISES, "raised"),
        (Fault.FLIPPED, "corrupt"),
        (Fault.CUT, "corrupt"),
        (Fault.EMPTY, "corrupt"),
    ],
)
def test_store_that_does_not_work_is_left_alone(fault, cause):
    error, parts = try_store(faulty({}, fault))
    assert error is not None
    assert error.cause == cause
    assert parts.breaker.state is BreakerState.OPEN
    assert parts.counters.value("transfer_failures_total", cause=cause) == 1


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.FORGETS])
def test_full_store_and_one_that_evicts_at_once_can_be_read(fault):
    error, _ = try_store(faulty({}, fault))
    assert error is None


def test_connection_that_cannot_be_made_is_told_in_its_own_words():
    def refuse():
        raise TransferError("redis://nowhere:1 refuses connections.", cause="unreachable")

    error, _ = try_store(refuse)
    assert "redis://nowhere:1" in str(error)


def test_connector_that_only_loads_writes_nothing():
    class ReadOnly(DictStore):
        def put(self, keys, objects):
            raise TransferError("read-only", cause="unreachable")

    assert try_store(lambda: ReadOnly({}), saves=False)[0] is None
    assert try_store(lambda: ReadOnly({}))[0] is not None


def test_connector_that_only_saves_reads_nothing():
    assert try_store(faulty({}, Fault.FLIPPED), loads=False)[0] is None


def test_canary_that_takes_too_long_is_not_wanted_any_more():
    parts = make_parts()
    canary = Canary(parts, parts.stored([make_pool().layout]))
    error = canary.wait(0.0)
    assert error.cause == "deadline"
    assert not canary.is_wanted


def test_who_waits_is_woken_by_the_result():
    parts = make_parts()
    canary = Canary(parts, parts.stored([make_pool().layout]))
    thread = threading.Thread(target=lambda: canary.run(parts.client()))
    thread.start()
    assert canary.wait(60.0) is None
    thread.join()


def test_store_is_tried_without_an_engine_and_left_as_it_was():
    objects = {}
    assert try_alone(make_parts(lambda: DictStore(objects))) is None
    assert not objects
    assert try_alone(make_parts(faulty({}, Fault.REFUSES))).cause == "unreachable"


def test_store_that_does_not_answer_without_an_engine_is_not_waited_for_any_longer():
    gated = GatedStore({})
    error = try_alone(make_parts(lambda: gated, start_timeout_s=0.05))
    assert error.cause == "deadline"
    assert gated.calls
