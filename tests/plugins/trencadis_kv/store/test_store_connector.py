"""The connector over a store in whole engines: two engines on one store, stores that go wrong, and broken connectors."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from support.kv.store_parts import GatedStore
from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext
from trencadis.records import ModelFacts
from trencadis_kv.store.format import HEADER_BYTES
from trencadis_kv.store.loads import Loads
from trencadis_kv.store.objects import BlockObjects
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import store_connector
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.kv_connector import KVConnectorConformance
from trencadis_testing.kv_faults import DictStore, Fault, Faults, FaultyStore
from trencadis_testing.workloads import arrivals, serve, wrong_texts

FACTS = ModelFacts(
    architecture="Fake",
    dtype="float32",
    vocab_size=97,
    max_model_len=256,
    eos_token_ids=(0,),
    num_parameters=1,
    weights_bytes=1,
    kv_bytes_per_token=24,
    fingerprint="one",
)
TODO = arrivals(4, num_requests=10)


def connector(make_store, *, clock=None, model=FACTS, **settings):
    context = ComponentContext(clock=clock or SimulatedClock(), seed=0, model=model)
    given = StoreSettings(**{"close_timeout_s": 1.0, **settings})
    return store_connector(make_store, given, context, name="shelf")


def count(pair, name, **labels):
    return pair.scheduler._parts.counters.value(name, **labels)


def after_ready(pair, do):
    """Let something go wrong once the store was found to work."""
    on_ready = pair.scheduler.on_ready

    def ready(layout):
        on_ready(layout)
        do()

    pair.scheduler.on_ready = ready


class Suite(KVConnectorConformance):
    has_threads = True

    def make(self):
        self.objects = {}
        return connector(lambda: DictStore(self.objects), clock=self.clock)


class TestStoreConnector(Suite):
    pass


class TestSmallStagingAndManyThreads(Suite):
    def make(self):
        self.objects = {}
        return connector(
            lambda: DictStore(self.objects),
            clock=self.clock,
            staging_bytes=2000,
            num_load_threads=4,
            num_save_threads=3,
        )


class TestDeviceWithAThreadOfItsOwn(Suite):
    def kv_cache(self, arrays):
        pool = super().kv_cache(arrays)
        pool.any_thread = False
        return pool

    def make(self):
        self.objects = {}
        return connector(lambda: DictStore(self.objects), clock=self.clock, max_load_bytes_per_step=200)


# ------------------------------------------------------------------------------------------------- whole engines


class Served:
    """What an engine with a connector made of the workload."""

    def __init__(self, pair, clock, *, todo=TODO, is_settled=True, **options):
        backend = FakeBackend(max_model_len=240, block_size=4)
        engine = make_engine(
            connector=pair,
            backend=backend,
            clock=clock,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            warmup=False,
            **options,
        )
        self.pair = pair

        def settle():
            if is_settled:
                assert pair.worker.wait_idle(60.0)

        served = serve(engine, clock, todo, after_step=settle)
        self.metrics = engine.metrics()
        engine.close()
        self.wrong = wrong_texts(served, todo)
        self.num_cached = sum(end.num_cached_tokens for end in served.ends.values())


def run(make_store, **settings):
    clock = SimulatedClock()
    return Served(connector(make_store, clock=clock, **settings), clock)


def test_second_engine_loads_what_the_first_one_computed():
    objects = {}
    first = run(lambda: DictStore(objects))
    second = run(lambda: DictStore(objects))
    assert first.wrong == second.wrong == []
    assert second.num_cached > first.num_cached
    assert count(second.pair, "lookups_total", result="hit") > 0
    loaded = count(second.pair, "tokens_total", direction="load")
    assert 0 < loaded <= second.num_cached
    assert 'trencadis_kv_tokens_total{connector="shelf",direction="load"}' in second.metrics


@pytest.mark.parametrize(
    "other",
    [
        {"model": attrs.evolve(FACTS, fingerprint="two")},
        {"namespace": "another"},
        {"numerics": "any"},
        {"loads": False},
    ],
    ids=["model", "namespace", "numerics", "loads off"],
)
def test_engine_that_must_not_share_loads_nothing(other):
    objects = {}
    run(lambda: DictStore(objects))
    second = run(lambda: DictStore(objects), **other)
    assert second.wrong == []
    assert count(second.pair, "tokens_total", direction="load") == 0


def test_engine_with_saves_off_leaves_the_store_as_it_is():
    objects = {}
    assert run(lambda: DictStore(objects), saves=False).wrong == []
    assert objects == {}


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.REFUSES])
def test_store_that_always_fails_costs_counters(fault):
    faults = Faults()
    faults.begin(fault)
    served = run(lambda: FaultyStore(DictStore({}), faults), failure_limit=3)
    assert served.wrong == []
    cause = {"raises": "raised", "refuses": "unreachable"}[fault]
    assert count(served.pair, "transfer_failures_total", cause=cause) > 0
    assert count(served.pair, "tokens_total", direction="save") == 0


@pytest.mark.parametrize("call", ["contains", "get", "put"])
def test_store_that_begins_to_fail_is_left_alone_after_a_few_failures(call):
    objects, faults = {}, Faults()
    run(lambda: DictStore(objects))
    clock = SimulatedClock()
    pair = connector(
        lambda: FaultyStore(DictStore(objects), faults),
        clock=clock,
        failure_limit=3,
        cooldown_s=1e6,
        num_load_threads=1,
    )
    after_ready(pair, lambda: faults.begin(Fault.REFUSES, calls={call}))
    served = Served(pair, clock, prefix_caching=False, todo=arrivals(4, num_requests=24))
    assert served.wrong == []
    assert count(pair, "transfer_failures_total", cause="unreachable") >= 3
    assert count(pair, "breaker_state") == 2
    assert faults.num_injected <= 3 + 4, "it was asked again and again"


@pytest.mark.parametrize("fault", [Fault.FLIPPED, Fault.CUT, Fault.EMPTY, Fault.HEADER])
def test_store_that_returns_garbage_costs_counters(fault):
    objects, faults = {}, Faults()
    run(lambda: FaultyStore(DictStore(objects), faults))
    clock = SimulatedClock()
    pair = connector(lambda: FaultyStore(DictStore(objects), faults), clock=clock, failure_limit=10**6)
    after_ready(pair, lambda: faults.begin(fault, calls={"get"}))
    served = Served(pair, clock)
    assert served.wrong == []
    corrupt = count(pair, "transfer_failures_total", cause="corrupt")
    incompatible = count(pair, "transfer_failures_total", cause="incompatible")
    assert corrupt + incompatible > 0
    assert count(pair, "tokens_total", direction="load") == 0


def test_store_whose_objects_changed_places_costs_counters():
    objects = {}
    run(lambda: DictStore(objects))
    blocks = [key for key in objects if not key.endswith("/layout")]
    objects.update(zip(blocks, [objects[key] for key in blocks[1:] + blocks[:1]], strict=True))
    served = run(lambda: DictStore(objects), failure_limit=10**6)
    assert served.wrong == []
    assert count(served.pair, "transfer_failures_total", cause="corrupt") > 0
    assert count(served.pair, "tokens_total", direction="load") == 0


def test_store_that_hangs_until_it_is_interrupted_costs_counters():
    objects = {}
    run(lambda: DictStore(objects))
    clock, stores = SimulatedClock(), []

    def make():
        store = GatedStore(objects)
        store.gate.set()
        stores.append(store)
        return store

    pair = connector(make, clock=clock, lookup_timeout_s=0.2, failure_limit=2, cooldown_s=1e6, close_timeout_s=0.2)
    after_ready(pair, lambda: [s.gate.clear() for s in stores])
    served = Served(pair, clock, is_settled=False)
    assert served.wrong == []
    assert count(pair, "transfer_failures_total", cause="deadline") >= 1
    assert count(pair, "tokens_total", direction="load") == 0


def test_store_that_cannot_be_used_is_no_reason_not_to_serve(caplog):
    def refuse():
        raise TransferError("shelf://nowhere refuses connections.", cause="unreachable")

    served = run(refuse)
    assert served.wrong == []
    assert "shelf://nowhere refuses connections" in caplog.text


def test_pair_with_other_stores_shares_the_store_and_nothing_else():
    objects, seen = {}, []
    pair = connector(lambda: DictStore(objects))

    def wrap(store):
        seen.append(store)
        return store

    clock = SimulatedClock()
    other = pair.with_stores(wrap)
    assert other.worker is not pair.worker
    Served(other, clock)
    assert seen
    assert objects


# ------------------------------------------------------------------------------------------------------- mutants


class Impatient(Suite):
    """The suite, without patience for what never comes."""

    has_threads = False

    def settle(self, pair):
        assert pair.worker.wait_idle(60.0)


def fails(test, **arguments):
    """Return whether the connector as it is now fails a test of the suite."""
    suite = Impatient()
    try:
        getattr(suite, test)(**arguments)
    except Exception:
        return True
    finally:
        suite.teardown_method()
    return False


def returns_another_prompts_block(monkeypatch):
    keys = BlockObjects.keys
    monkeypatch.setattr(BlockObjects, "keys", lambda self, hashes: keys(self, [b"\0" * 32 for _ in hashes]))
    skips_verification(monkeypatch)


def skips_verification(monkeypatch):
    def unpack(self, block_hash, data, out):
        out[: len(data) - HEADER_BYTES] = data[HEADER_BYTES:]

    monkeypatch.setattr(BlockObjects, "unpack", unpack)


def ignores_failures(monkeypatch):
    fetch = Loads.fetch

    def fetched(self, client, hashes):
        data, _ = fetch(self, client, hashes)
        return np.resize(data, (len(hashes), self._block_bytes)), None

    monkeypatch.setattr(Loads, "fetch", fetched)


def leaks_releases(monkeypatch):
    poll = Loads.poll
    monkeypatch.setattr(Loads, "poll", lambda self: attrs.evolve(poll(self), released=()))


def reports_twice(monkeypatch):
    poll, seen = Loads.poll, []

    def twice(self):
        report = poll(self)
        again = tuple(seen)
        seen[:] = report.loaded
        return attrs.evolve(report, loaded=(*report.loaded, *again))

    monkeypatch.setattr(Loads, "poll", twice)


MUTANTS = {
    returns_another_prompts_block: ("test_what_was_saved_is_loaded_bit_for_bit", {}),
    ignores_failures: ("test_what_is_lost_between_the_lookup_and_the_load_is_a_failed_load", {}),
    leaks_releases: ("test_cancelled_load_is_released_and_touches_nothing_from_then_on", {"num_steps": 0}),
    reports_twice: ("test_prompt_that_comes_back_is_loaded", {}),
}


@pytest.mark.parametrize("mutate", MUTANTS)
def test_suite_fails_a_broken_connector(mutate, monkeypatch):
    test, arguments = MUTANTS[mutate]
    assert not fails(test, **arguments)
    mutate(monkeypatch)
    assert fails(test, **arguments)


def test_connector_without_verification_fails_where_a_store_lies(monkeypatch):
    skips_verification(monkeypatch)
    with pytest.raises(AssertionError):
        test_store_that_returns_garbage_costs_counters(Fault.FLIPPED)
