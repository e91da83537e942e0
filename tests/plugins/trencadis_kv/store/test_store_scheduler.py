from __future__ import annotations

import logging

import attrs
import pytest

from support.kv.store_parts import BLOCK_BYTES, BLOCK_SIZE, GatedStore, hashes_of, make_parts, make_pool
from trencadis.errors import ConfigValueError, TransferError
from trencadis.records import ConnectorReport, FailedLoad, Request
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.breaker import BreakerState
from trencadis_kv.store.messages import decode_orders
from trencadis_kv.store.staging import Staging
from trencadis_kv.store.store_scheduler import StoreScheduler
from trencadis_testing.kv_faults import DictStore, Fault, Faults, FaultyStore

HASHES = tuple(hashes_of(*range(6)))


class Scripted(KVPolicy):
    """Answers what it is told, and remembers what it was asked."""

    def __init__(self):
        self.views = []
        self.wait_s = 3.0
        self.num_saved = 100

    def admits_load(self, view):
        self.views.append(view)
        return self.wait_s

    def admits_save(self, view):
        self.views.append(view)
        return self.num_saved

    def on_failure(self, view):
        self.views.append(view)
        return "retry"


class House:
    def __init__(self, *, num_stored=4, gated=False, ready=True, **settings):
        self.objects = {}
        self.faults = Faults()
        self.store = GatedStore(self.objects) if gated else DictStore(self.objects)
        self.policy = Scripted()
        self.parts = make_parts(lambda: FaultyStore(self.store, self.faults), policy=self.policy, **settings)
        self.layout = make_pool().layout
        keys = self.parts.objects(self.layout).keys(HASHES[:num_stored])
        self.objects.update(dict.fromkeys(keys, b""))
        self.staging = Staging(10 * BLOCK_BYTES)
        self.scheduler = StoreScheduler(self.parts, self.staging)
        if ready:
            if gated:
                self.store.gate.set()
            self.scheduler.on_ready(self.layout)
            if gated:
                self.store.gate.clear()

    def ask(self, name="r", *, num_local_tokens=0, hashes=HASHES):
        request = Request(request_id=name, prompt_token_ids=(1,))
        return self.scheduler.lookup(request, block_hashes=hashes, num_local_tokens=num_local_tokens)

    def lookup(self, name="r", **options):
        found = self.ask(name, **options)
        if found.pending:
            self.settle()
            found = self.ask(name, **options)
        return found

    def settle(self):
        assert self.parts.activity.wait_idle(60.0)

    def message(self):
        return decode_orders(self.scheduler.take_message())

    def count(self, name, **labels):
        return self.parts.counters.value(name, **labels)


@pytest.fixture
def house():
    made = []

    def make(**options):
        made.append(House(**options))
        return made[-1]

    yield make
    for one in made:
        one.faults.end()
        one.scheduler.close()


# ------------------------------------------------------------------------------------------------------ look-ups


def test_hit_is_what_the_store_has_beyond_the_local_hit(house):
    one = house()
    found = one.lookup(num_local_tokens=2 * BLOCK_SIZE)
    assert found == attrs.evolve(found, num_tokens=4 * BLOCK_SIZE, pending=False, timeout_s=3.0)
    (view,) = one.policy.views
    assert (view.num_tokens, view.num_local_tokens, view.num_bytes) == (2 * BLOCK_SIZE, 2 * BLOCK_SIZE, 2 * BLOCK_BYTES)
    assert (view.request.request_id, view.timeout_s) == ("r", 10.0)
    assert one.count("lookups_total", result="hit") == 1
    assert one.lookup("has all", num_local_tokens=4 * BLOCK_SIZE).num_tokens == 0
    assert one.count("lookups_total", result="miss") == len(one.policy.views) == 1


def test_policy_is_told_what_was_measured_and_waits_no_longer_than_the_config_says(house):
    one = house(load_timeout_s=2.0)
    one.scheduler.on_step(num_tokens=100, device_s=1.0)
    one.parts.cost.loaded(num_bytes=BLOCK_BYTES, seconds=0.5)
    assert one.lookup().timeout_s == 2.0
    (view,) = one.policy.views
    assert (view.compute_s, view.load_s) == pytest.approx((0.16, 2.0))


@pytest.mark.parametrize("wait_s", [0.0, -1.0, float("nan")])
def test_policy_that_declines_makes_it_a_miss(house, wait_s):
    one = house()
    one.policy.wait_s = wait_s
    assert one.lookup().num_tokens == 0
    assert one.count("lookups_total", result="declined") == 1


def test_nothing_is_asked_if_the_engine_has_all_or_loads_are_off(house):
    one = house(gated=True)
    before = len(one.store.calls)
    for local in (6, 7):
        assert one.ask(num_local_tokens=local * BLOCK_SIZE) == one.ask(hashes=())
    assert len(one.store.calls) == before
    assert not house(loads=False).ask().pending


def test_store_that_does_not_answer_is_a_miss_and_a_failure(house):
    one = house(gated=True, failure_limit=1, lookup_timeout_s=0.25)
    assert one.ask().pending
    one.parts.clock.advance(0.3)
    assert one.ask() == attrs.evolve(one.ask("other"))
    assert one.count("lookups_total", result="timeout") == 1
    assert one.count("transfer_failures_total", cause="deadline") == 1
    assert not one.parts.breaker.allows


# --------------------------------------------------------------------------------------------------------- loads


@pytest.mark.parametrize(
    ("later_s", "cause"), [(2.9, "cancelled"), (3.1, "deadline"), (None, "")], ids=["early", "late", "ended meanwhile"]
)
@pytest.mark.representatives(3)
def test_load_is_ordered_and_cancelled_once_and_counts_against_the_store_after_its_time(house, later_s, cause):
    one = house(failure_limit=1)
    transfer_id = one.lookup().transfer_id
    one.scheduler.on_allocated(transfer_id, blocks=[9, 8], block_hashes=HASHES[:2])
    (order,) = one.message().loads
    assert (order.transfer_id, order.blocks, order.hashes) == (transfer_id, [9, 8], list(HASHES[:2]))
    assert one.scheduler.take_message() == b""
    if later_s is None:
        one.scheduler.on_report(ConnectorReport(loaded=(transfer_id,)))
    one.parts.clock.advance(later_s or 9.0)
    one.scheduler.on_cancelled(transfer_id)
    assert one.message().cancels == [transfer_id]
    assert [one.count("transfer_failures_total", cause=each) for each in ("cancelled", "deadline")] == [
        cause == "cancelled",
        cause == "deadline",
    ]
    assert one.parts.breaker.allows == (cause != "deadline")


def test_policy_says_what_becomes_of_a_failed_load_and_one_that_nobody_knows_is_computed(house):
    one = house()
    request = Request(request_id="r", prompt_token_ids=(1,))
    for attempt in (1, 2):
        transfer_id = one.lookup().transfer_id
        one.scheduler.on_allocated(transfer_id, blocks=[9, 8, 7], block_hashes=HASHES[:3])
        failed = FailedLoad(transfer_id=transfer_id, num_valid_tokens=BLOCK_SIZE, cause="lost")
        one.scheduler.on_report(ConnectorReport(failed=(failed,)))
        assert one.scheduler.on_failed(request, failed) == "retry"
        expected = {"cause": "lost", "num_valid_tokens": 4, "num_lost_tokens": 8, "num_attempts": attempt}
        assert attrs.asdict(one.policy.views[-1]) == expected
    assert one.scheduler.on_failed(request, attrs.evolve(failed, transfer_id=99)) == "compute"


# --------------------------------------------------------------------------------------------------------- saves


def test_computed_blocks_are_ordered_to_be_saved_once(house):
    one = house()
    one.scheduler.on_computed(blocks=[3, 4], block_hashes=HASHES[:2])
    one.scheduler.on_computed(blocks=[5, 6], block_hashes=HASHES[1:3])
    saves = one.message().saves
    assert [(save.blocks, save.hashes) for save in saves] == [([3, 4], list(HASHES[:2])), ([6], [HASHES[2]])]
    assert one.message().saves == []


def test_policy_admits_leading_blocks(house):
    one = house()
    one.policy.num_saved = 1
    one.staging.open(BLOCK_BYTES)
    one.staging.take(5)
    one.scheduler.on_computed(blocks=[3, 4, 5], block_hashes=HASHES[:3])
    (view,) = one.policy.views
    assert (view.num_blocks, view.num_bytes, view.staged_fraction) == (3, 3 * BLOCK_BYTES, 0.5)
    assert one.message().saves[0].blocks == [3]
    assert one.count("dropped_saves_total", reason="policy") == 2
    one.scheduler.on_computed(blocks=[4], block_hashes=HASHES[1:2])
    assert one.message().saves[0].blocks == [4]


def test_nothing_is_saved_if_saves_are_off(house):
    one = house(saves=False)
    one.scheduler.on_computed(blocks=[3], block_hashes=HASHES[:1])
    assert one.scheduler.take_message() == b""


# -------------------------------------------------------------------------------------------- start-up and breaker


def down():
    one = House(ready=False)
    one.faults.begin(Fault.REFUSES)
    return one


def test_store_that_cannot_be_used_is_an_error_in_the_log_and_serving_goes_on(caplog):
    one = down()
    with caplog.at_level(logging.ERROR):
        one.scheduler.on_ready(one.layout)
    (record,) = caplog.records
    assert "The KV store of shelf cannot be used (unreachable): The store refuses to put" in record.message
    assert "tried again in 5 s" in record.message
    assert one.ask().num_tokens == 0
    assert one.count("lookups_total", result="skipped") == 1
    one.scheduler.on_computed(blocks=[3], block_hashes=HASHES[:1])
    assert one.scheduler.take_message() == b""
    one.scheduler.close()


def test_required_store_that_cannot_be_used_refuses_to_start_and_says_why():
    def refuse():
        raise TransferError("redis://nowhere:1 refuses connections.", cause="unreachable")

    scheduler = StoreScheduler(make_parts(refuse, required=True), Staging(1))
    said = r"store of shelf cannot be used: redis://nowhere:1 refuses .* \[kv_connector.shelf\] required"
    with pytest.raises(ConfigValueError, match=said):
        scheduler.on_ready(make_pool().layout)
    scheduler.close()
    scheduler.close()


def test_store_that_hangs_at_start_up_is_interrupted(caplog):
    one = House(ready=False, gated=True, start_timeout_s=0.01)
    one.scheduler.on_ready(one.layout)
    assert "did not answer within 0.01 s" in caplog.text
    one.settle()
    assert not one.parts.breaker.allows
    one.scheduler.close()


def test_store_that_works_again_is_used_again():
    one = down()
    one.scheduler.on_ready(one.layout)
    one.parts.clock.advance(5.0)
    one.ask()
    one.settle()
    assert one.parts.breaker.state is BreakerState.OPEN, "the probe failed"
    one.faults.end()
    one.parts.clock.advance(4.9)
    one.ask()
    one.settle()
    assert one.parts.breaker.state is BreakerState.OPEN, "too early"
    one.parts.clock.advance(0.2)
    one.scheduler.on_computed(blocks=[3], block_hashes=HASHES[5:])
    one.settle()
    assert one.parts.breaker.allows
    assert one.lookup().num_tokens == 4 * BLOCK_SIZE
    one.scheduler.close()


def test_probe_that_hangs_is_interrupted(house):
    one = house(gated=True, start_timeout_s=1.0)
    one.parts.breaker.open()
    one.parts.clock.advance(5.0)
    one.ask()
    assert one.store.is_waiting.wait(60.0)
    one.parts.clock.advance(1.1)
    one.ask()
    one.settle()
    assert one.parts.breaker.state is BreakerState.OPEN
