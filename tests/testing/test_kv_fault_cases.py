"""The fault cases pass a connector over a dictionary, and fail every one that believes, forgets or waits too much."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import ConnectorReport
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store import objects
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.loads import Loads
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import store_connector
from trencadis_kv.store.threads import StoreThreads
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.kv_connector import KVConnectorConformance
from trencadis_testing.kv_fault_cases import KVFaultConformance
from trencadis_testing.kv_faults import DictStore


def make_dictionary(suite: Any) -> ConnectorPair:
    """Return a connector over a dictionary of its own, that loads all it can."""
    parts = {"kv_policy": KVPolicy, "kv_codec": IdentityCodec}
    context = ComponentContext(clock=suite.clock, seed=0, make=lambda noun, _: parts[noun]())
    kept: dict[str, bytes] = {}
    return store_connector(lambda: DictStore(kept), StoreSettings(), context, name="dictionary")


class TestDictionary(KVConnectorConformance):
    has_threads = True

    def make(self):
        return make_dictionary(self)


class TestDictionaryFaults(KVFaultConformance):
    def make(self):
        return make_dictionary(self)


# ------------------------------------------------------------------------------------------------------- mutants


def believes_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(objects, "verify", lambda *_, **__: None)


def calls_failed_loads_good(patch: pytest.MonkeyPatch) -> None:
    right = Loads.poll

    def poll(self):
        report = right(self)
        failed = [one.transfer_id for one in report.failed]
        return attrs.evolve(report, loaded=(*report.loaded, *failed), failed=())

    patch.setattr(Loads, "poll", poll)


def reports_twice(patch: pytest.MonkeyPatch) -> None:
    right, last = Loads.poll, []

    def poll(self):
        report = right(self)
        twice = ConnectorReport(loaded=(*last, *report.loaded), failed=report.failed, released=report.released)
        last[:] = report.loaded
        return twice

    patch.setattr(Loads, "poll", poll)


def never_releases(patch: pytest.MonkeyPatch) -> None:
    right = Loads.poll
    patch.setattr(Loads, "poll", lambda self: attrs.evolve(right(self), released=()))


def gives_up_for_good(patch: pytest.MonkeyPatch) -> None:
    from trencadis_kv.store.store_scheduler import StoreScheduler

    patch.setattr(StoreScheduler, "on_failed", lambda self, *_: setattr(self, "_lookups", None) or "compute")


def waits_for_the_store(patch: pytest.MonkeyPatch) -> None:
    """Looks up on the engine's thread, as nobody may."""
    from trencadis_kv.store.lookups import LookupTask

    right = StoreThreads.put

    def put(self, task):
        if isinstance(task, LookupTask):
            task.run(self._make_client())
            return True
        return right(self, task)

    patch.setattr(StoreThreads, "put", put)
    patch.setattr("trencadis_testing.kv_faults._LONGEST_STALL_S", 0.3)
    patch.setattr("trencadis_testing.kv_fault_cases._SOON_S", 1.0)


MUTANTS = [
    (believes_everything, "test_object_that_is_not_what_was_saved_is_computed"),
    (calls_failed_loads_good, "test_store_that_does_not_keep_what_it_is_given_costs_a_miss"),
    (calls_failed_loads_good, "test_object_that_is_not_what_was_saved_is_computed"),
    (calls_failed_loads_good, "test_store_that_claims_what_it_has_not_costs_a_miss"),
    (calls_failed_loads_good, "test_shared_prefix_of_requests_waiting_for_kv_survives_a_failed_load"),
    (calls_failed_loads_good, "test_pressure_aborts_and_changing_faults_leave_nothing_behind"),
    (reports_twice, "test_slow_store_changes_no_text"),
    (never_releases, "test_pressure_aborts_and_changing_faults_leave_nothing_behind"),
    (never_releases, "test_stalled_store_lets_the_engine_close"),
    (gives_up_for_good, "test_store_that_is_well_again_is_used_again"),
    (waits_for_the_store, "test_store_that_stalls_holds_nobody_up"),
]


@pytest.mark.representatives(5)
@pytest.mark.parametrize(("mutate", "test"), MUTANTS)
def test_suite_fails_a_connector_that_is_broken(failures_of, monkeypatch, mutate, test):
    mutate(monkeypatch)
    assert failures_of(_Faults, _make_nothing, only=test)


def test_every_case_is_needed_by_a_mutant():
    assert {test for _, test in MUTANTS} == {name for name in dir(KVFaultConformance) if name.startswith("test_")}


def test_a_connector_without_a_store_is_skipped_in_words():
    class Loop(KVFaultConformance):
        def make(self):
            return LoopConnector().pair()

    with pytest.raises(pytest.skip.Exception, match="not made by store_connector"):
        Loop().test_slow_store_changes_no_text()


class _Faults(KVFaultConformance):
    """The harness calls ``make`` without a suite, and so without its clock."""

    __test__ = False

    def make_one(self, faults=None):
        self.make = lambda: make_dictionary(self)
        return super().make_one(faults)


def _make_nothing():
    raise AssertionError("make_one gives the suite another make")
