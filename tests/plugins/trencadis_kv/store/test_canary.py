from __future__ import annotations

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


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault.NONE, ""),
        (Fault.FULL, ""),
        (Fault.FORGETS, ""),
        (Fault.REFUSES, "unreachable"),
        (Fault.RAISES, "raised"),
        (Fault.FLIPPED, "corrupt"),
        (Fault.CUT, "corrupt"),
        (Fault.EMPTY, "corrupt"),
    ],
)
@pytest.mark.representatives(4)
def test_store_is_left_alone_unless_what_is_written_can_be_read_or_is_not_there(fault, cause):
    objects = {}
    error, parts = try_store(faulty(objects, fault))
    assert (str(error.cause) if error else "") == cause
    assert parts.breaker.state is (BreakerState.OPEN if cause else BreakerState.CLOSED)
    assert parts.counters.value("transfer_failures_total", cause=cause) == bool(cause)
    if fault is Fault.NONE:
        assert [key.rsplit("/", 1)[1] for key in objects] == ["layout"], "a description is left alone"


def test_connector_that_only_loads_writes_nothing_and_one_that_only_saves_reads_nothing():
    class ReadOnly(DictStore):
        def put(self, keys, objects):
            raise TransferError("read-only", cause="unreachable")

    assert try_store(lambda: ReadOnly({}), saves=False)[0] is None
    assert try_store(lambda: ReadOnly({}))[0] is not None
    assert try_store(faulty({}, Fault.FLIPPED), loads=False)[0] is None


def test_canary_that_takes_too_long_is_not_wanted_any_more():
    parts = make_parts()
    canary = Canary(parts, parts.stored([make_pool().layout]))
    assert canary.wait(0.0).cause == "deadline"
    assert not canary.is_wanted


def test_store_is_tried_without_an_engine_left_as_it_was_and_waited_for_no_longer():
    objects, gated = {}, GatedStore({})
    assert try_alone(make_parts(lambda: DictStore(objects))) is None
    assert not objects
    assert try_alone(make_parts(faulty({}, Fault.REFUSES))).cause == "unreachable"
    assert try_alone(make_parts(lambda: gated, start_timeout_s=0.05)).cause == "deadline"
    assert gated.calls
