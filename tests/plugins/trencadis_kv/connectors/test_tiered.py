from __future__ import annotations

import tempfile

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.kv.tiered_children import RaisingScheduler, RaisingWorker, ScriptedScheduler, loop, raising, tiers
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError, ContractError, TrencadisError
from trencadis.interfaces import ComponentContext, ConnectorPair, Lookup
from trencadis.records import Request
from trencadis_kv.codecs.zstd import Zstd
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.filesystem.connector import make_filesystem
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.host_offload.connector import make_host_offload
from trencadis_kv.connectors.tiered.child import Child, TierCounters, merged
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.connectors.tiered.connector import make_tiered
from trencadis_kv.connectors.tiered.scheduler import TierLookups
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.policies.always import Always
from trencadis_kv.store.breaker import Breaker
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import store_connector
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing import KVConnectorConformance
from trencadis_testing.connector_harness import ConnectorHarness, hashes_of
from trencadis_testing.fake_pool import FakeKVCache
from trencadis_testing.kv_fault_cases import KVFaultConformance
from trencadis_testing.kv_faults import DictStore, Faults, FaultyStore


class Losing(KVConnectorConformance):
    """Forgets what the children that have a dictionary keep."""

    children: tuple[ConnectorPair, ...] = ()

    def lose(self, pair):
        for child in self.children:
            child.worker._store.blocks.clear()

    def tiers(self, **children):
        self.children = tuple(child for child in children.values() if hasattr(child.worker, "_store"))
        return tiers(children)


class TestTwoTiers(Losing):
    def make(self):
        return self.tiers(near=loop(delay=1), far=loop(delay=3))


class TestTiersThatAreSlowToAnswerAndHoldBlocks(Losing):
    def make(self):
        return self.tiers(near=loop(delay=2, pending=2, holds=True), far=loop(delay=1, pending=5, holds=True))


class TestTierInFrontThatRaises(Losing):
    def make(self):
        return self.tiers(broken=raising(), far=loop(delay=1))


class TestTierWhoseWorkerRaises(Losing):
    """Its scheduler side offers what it never loads."""

    def make(self):
        broken, whole = loop(delay=1), loop(delay=2)
        return self.tiers(broken=attrs.evolve(broken, worker=RaisingWorker()), far=whole)

    def lose(self, pair):
        self.children[-1].worker._store.blocks.clear()


class TestTierWhoseLoadsAlwaysFail(Losing):
    def make(self):
        return self.tiers(failing=loop(fail=lambda transfer_id: 0), far=loop(delay=1))

    def test_what_was_saved_is_loaded_bit_for_bit(self):
        """The first load fails; the harness does not look up again, as an engine would."""
        harness, hashes = self.harness(), hashes_of(range(5))
        saved = harness.save([9, 2, 7, 4, 11], hashes)
        assert harness.load(harness.lookup(hashes).transfer_id, [3, 14, 0, 8, 6], hashes) == "injected"
        found = harness.lookup(hashes)
        for _ in range(6):
            if harness.load(found.transfer_id, [3, 14, 0, 8, 6], hashes) == "":
                break
            found = harness.lookup(hashes)
        assert harness.contents([3, 14, 0, 8, 6]) == saved, "the tier that fails is never left alone"


class TestTierThatFailsNowAndThen(Losing):
    def make(self):
        return self.tiers(
            flaky=loop(fail=lambda transfer_id: 4 if transfer_id % 2 else None, delay=2), far=loop(delay=1)
        )

    def test_what_was_saved_is_loaded_bit_for_bit(self):
        """Every other load brings one block."""
        harness, hashes = self.harness(), hashes_of(range(5))
        saved = harness.save([9, 2, 7, 4, 11], hashes)
        assert harness.load(harness.lookup(hashes).transfer_id, [3, 14, 0, 8, 6], hashes) == ""
        assert harness.contents([3, 14, 0, 8, 6]) == saved


class TestTierWithinATier(Losing):
    def make(self):
        inner = tiers({"a": loop(delay=1, holds=True), "b": loop(delay=2, holds=True)})
        return self.tiers(inner=inner, far=loop(delay=1, holds=True))

    def lose(self, pair):
        pytest.skip("the dictionaries are two levels below")


class TestHostMemoryBeforeADirectory(KVConnectorConformance):
    """Built-in children, with threads of their own and a codec."""

    has_threads = True

    @pytest.fixture(autouse=True)
    def room(self, tmp_path):
        self.path = tmp_path

    def make(self):
        context = ComponentContext(clock=self.clock, seed=0, make=self._make)
        return make_tiered(TieredConfig(children=("host_offload", "filesystem")), context)

    def _make(self, noun, name):
        context = ComponentContext(clock=self.clock, seed=0, make=self._make)
        if name == "host_offload":
            return make_host_offload(HostOffloadConfig(capacity_bytes=1 << 20), context)
        if name == "filesystem":
            path = tempfile.mkdtemp(dir=self.path)
            return make_filesystem(FilesystemConfig(path=path, min_free_ratio=0.0), context)
        return {"eviction": Lru, "kv_codec": lambda: Zstd(item_bytes=8), "kv_policy": Always}[noun]()


def test_children_are_made_by_name_in_order():
    asked = []

    def make(noun, name):
        asked.append((noun, name))
        return loop() if noun == "kv_connector" else None

    make_tiered(TieredConfig(children=("b", "a")), ComponentContext(clock=SimulatedClock(), seed=0, make=make))
    assert asked[:2] == [("kv_connector", "b"), ("kv_connector", "a")]


def test_what_is_no_connector_is_refused_by_name():
    context = ComponentContext(clock=SimulatedClock(), seed=0, make=lambda noun, name: object())
    with pytest.raises(ContractError, match="children: mine is a object, not a ConnectorPair"):
        make_tiered(TieredConfig(children=("mine",)), context)


def test_a_block_is_saved_by_all_before_another_tier_loads_into_it():
    """The near tier loads at once, into a block that the far one is to save in the same step."""
    near, far = loop(), loop()
    pair = tiers({"near": near, "far": far})
    harness = ConnectorHarness(
        pair, block_size=4, cache=lambda arrays: FakeKVCache(arrays, block_size=4), settle=lambda: None
    )
    old, new = hashes_of([1]), hashes_of([2])
    near.worker.begin_step = _eager(near.worker)
    harness.save([5], old)
    held = harness.contents([7])
    pair.scheduler.on_computed(blocks=[7], block_hashes=new)  # its sequence ends, and the block is given away
    harness.load(harness.lookup(old).transfer_id, [7], old)
    assert [array.tolist() for array in far.worker._store.blocks[new[0].hex()]] == held[0]


def _eager(worker):
    """Returns a ``begin_step`` that loads before it returns, as one that copies from host memory may."""
    begin = type(worker).begin_step

    def begin_step(message):
        begin(worker, message)
        for _, blocks, hashes in worker._loads.values():
            worker._copy_in(blocks, hashes)

    return begin_step


@pytest.fixture
def load(tmp_path):
    from trencadis.registry import load_with_plugins, resolve_plan

    def _load(text):
        file = tmp_path / "serve.toml"
        file.write_text(text)
        resolved, registry = load_with_plugins(file=file, environ={})
        return resolve_plan(resolved.config, registry)

    return _load


@pytest.mark.parametrize(
    ("children", "said"),
    [
        ('["redis", "redis"]', "redis is named twice"),
        ("[]", "children"),
        ('["host_offload", "tiered"]', "it would be within itself"),
        ('["host_offlaod"]', "host_offload"),
    ],
)
def test_children_that_make_no_sense_are_refused_in_words(load, children, said):
    with pytest.raises(TrencadisError, match=said) as error:
        load(f'[kv_connector]\nname = "tiered"\n[kv_connector.tiered]\nchildren = {children}\n')
    assert "children" in str(error.value)


class TestFaultsOfBothTiers(KVFaultConformance):
    """Two dictionaries that go wrong together: what one lacks, the other has not got either."""

    def make(self):
        return self.make_faulty(Faults())

    def make_faulty(self, faults):
        clock = self.clock
        self.children = {name: dictionary(clock, faults) for name in ("near", "far")}
        pair = tiers(self.children, clock=clock, policy=KVPolicy(), failure_limit=10**6)
        self.__dict__.setdefault("_made", []).append(pair)
        return pair

    def settle(self, pair):
        for child in self.children.values():
            child.worker.wait_idle(0.02)

    def rest(self, pair):
        for child in self.children.values():
            child.worker.wait_idle(10.0)


def dictionary(clock, faults):
    """Returns a connector over a dictionary of its own, which loads all it can and goes wrong as it is told."""
    parts, kept = {"kv_policy": KVPolicy, "kv_codec": IdentityCodec}, {}
    context = ComponentContext(clock=clock, seed=0, make=lambda noun, _: parts[noun]())
    settings = StoreSettings(failure_limit=10**6, lookup_timeout_s=0.3)
    return store_connector(lambda: FaultyStore(DictStore(kept), faults), settings, context, name="dictionary")


def test_children_are_components_that_the_plan_finds():
    assert attrs.fields(TieredConfig).children.metadata["component"] == "kv_connector"


NEAR = """# HELP trencadis_kv_lookups_total Look-ups.
# TYPE trencadis_kv_lookups_total counter
trencadis_kv_lookups_total{connector="a",result="hit"} 3.0
# HELP trencadis_kv_load_seconds Loads.
# TYPE trencadis_kv_load_seconds histogram
trencadis_kv_load_seconds_bucket{le="1.0"} 2.0
trencadis_kv_load_seconds_bucket{le="+Inf"} 2.0
trencadis_kv_load_seconds_count 2.0
trencadis_kv_load_seconds_sum 0.5
"""


FAR = NEAR.replace("3.0", "7.0").replace('connector="a",', "")


def _samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_children_with_the_same_metrics_are_told_apart_by_a_label():
    text = merged({"near": NEAR, "far": FAR, "silent": ""})
    samples = _samples(text)
    assert samples[("trencadis_kv_lookups_total", ("connector", "a"), ("result", "hit"), ("tier", "near"))] == 3.0
    assert samples[("trencadis_kv_lookups_total", ("result", "hit"), ("tier", "far"))] == 7.0
    assert samples[("trencadis_kv_load_seconds_bucket", ("le", "1.0"), ("tier", "far"))] == 2.0
    assert len(samples) == len(_samples(NEAR)) + len(_samples(FAR))
    assert text.count("# TYPE trencadis_kv_lookups_total counter") == 1
    assert text.count("# HELP trencadis_kv_load_seconds ") == 1


def test_a_text_that_cannot_be_read_is_left_out_with_a_warning(caplog):
    text = merged({"near": NEAR, "broken": "trencadis{ 1 2 3 what"})
    assert len(_samples(text)) == len(_samples(NEAR))
    assert "The metrics of the KV connector broken cannot be read." in caplog.text


def test_counters_are_shown_by_tier():
    counters = TierCounters()
    counters.watch("near", lambda: 2.0)
    counters.looked_up("near", "hit")
    counters.ended("near", "failed")
    counters.promoted("near", 5)
    samples = _samples(counters.text())
    assert samples[("trencadis_kv_tier_loads_total", ("result", "failed"), ("tier", "near"))] == 1
    assert samples[("trencadis_kv_tier_lookups_total", ("result", "hit"), ("tier", "near"))] == 1
    assert samples[("trencadis_kv_tier_promoted_blocks_total", ("tier", "near"))] == 5
    assert samples[("trencadis_kv_tier_state", ("tier", "near"))] == 2


REQUEST = Request(request_id="r", prompt_token_ids=(1, 2, 3))


class Scene:
    def __init__(self, side):
        self.clock, self.counters, self.side = SimulatedClock(), TierCounters(), side
        breaker = Breaker(self.clock, name="x", failure_limit=3, failure_window_s=30.0, cooldown_s=5.0)
        self.child = Child("x", side, breaker=breaker, counters=self.counters, probe_s=0.5)

    def lookup(self):
        return self.child.lookup(REQUEST, block_hashes=[b"1"], num_local_tokens=0)

    def count(self, result):
        return self.counters.value("lookups_total", tier="x", result=result)

    @property
    def state(self):
        return self.counters.value("state", tier="x")


def test_a_look_up_that_raises_or_finds_what_is_approximate_is_a_miss_and_counted():
    """What is approximate is not what the other children have under the same hashes."""

    class Near(ScriptedScheduler):
        def lookup(self, request, **given):
            return Lookup(num_tokens=4, transfer_id=1, approximate=True)

    for side, result in ((RaisingScheduler(), "raised"), (Near(), "declined")):
        scene = Scene(side)
        assert scene.lookup() == Lookup()
        assert (scene.count(result), scene.count("hit")) == (1, 0)
        scene.child.close()


def test_one_that_keeps_raising_is_left_alone_and_asked_once_in_a_while():
    scene = Scene(RaisingScheduler())
    for _ in range(3):
        assert scene.child.can_look_up()
        scene.lookup()
    assert not scene.child.can_look_up()
    assert not scene.child.is_used
    assert scene.state == 2
    scene.clock.advance(5.0)
    assert scene.child.can_look_up()
    assert not scene.child.can_look_up(), "only one question tries it"
    scene.lookup()
    assert not scene.child.can_look_up(), "the trial raised"
    assert scene.count("skipped") == 3


def test_one_that_answers_again_is_used_again_and_a_trial_that_nobody_finished_is_no_answer():
    """The request was aborted, or had enough from another child."""
    scene = Scene(ScriptedScheduler())
    for _ in range(3):
        scene.child.timed_out()
    assert not scene.child.is_used
    scene.clock.advance(5.0)
    assert scene.child.can_look_up()
    scene.clock.advance(0.6)
    assert not scene.child.can_look_up()
    scene.clock.advance(5.0)
    assert scene.child.can_look_up()
    scene.lookup()
    assert scene.child.is_used
    assert (scene.count("timeout"), scene.count("miss")) == (3, 1)


@pytest.mark.parametrize(
    ("cause", "num_valid_tokens", "counts"),
    [
        ("unreachable", 0, True),
        ("unreachable", 16, True),
        ("deadline", 0, True),
        ("corrupt", 0, True),
        ("evicted", 0, False),
        ("incompatible", 0, False),
        ("full", 0, False),
        ("gone fishing", 0, True),
        ("gone fishing", 16, False),
    ],
)
def test_failed_loads_count_unless_they_are_everyday_life(cause, num_valid_tokens, counts):
    scene = Scene(ScriptedScheduler())
    for _ in range(3):
        scene.child.failed(cause, num_valid_tokens=num_valid_tokens)
    assert scene.child.is_used != counts
    assert scene.counters.value("loads_total", tier="x", result="failed") == 3


def test_one_that_raises_where_blocks_are_at_stake_is_closed():
    side = ScriptedScheduler()
    scene = Scene(side)

    def fail(side):
        raise RuntimeError("half done")

    assert not scene.child.call_or_close("on_allocated", fail)
    assert scene.child.is_closed
    assert scene.state == 3
    assert ("close",) in side.told
    assert not scene.child.call_or_close("on_cancelled", lambda side: side.on_cancelled(1))
    assert scene.child.call("take_message", lambda side: b"x", b"") == b""
    assert not scene.child.can_look_up()


def test_one_that_is_not_ready_is_closed_unless_it_is_required():
    class NotReady(ScriptedScheduler):
        error = OSError("no disk")

        def on_ready(self, layout):
            raise self.error

    scene = Scene(NotReady())
    scene.child.ready(None)
    assert scene.child.is_closed
    NotReady.error = ConfigValueError("no such server")
    with pytest.raises(ConfigValueError, match="no such server"):
        Scene(NotReady()).child.ready(None)


class LookupScene:
    def __init__(self, *sides):
        self.clock, self.counters, self.sides = SimulatedClock(), TierCounters(), sides
        children = [
            Child(
                str(i),
                side,
                breaker=Breaker(self.clock, name=str(i), failure_limit=2, failure_window_s=30, cooldown_s=5),
                counters=self.counters,
                probe_s=1.0,
            )
            for i, side in enumerate(sides)
        ]
        self.lookups = TierLookups(children, clock=self.clock, timeout_s=1.0)

    def ask(self, name="r", *, num_local_tokens=0, last=b"3", without=()):
        hits = self.lookups.find(
            Request(request_id=name, prompt_token_ids=(1,)),
            block_hashes=[b"1", b"2", last],
            num_local_tokens=num_local_tokens,
            num_tokens=12,
            without=without,
        )
        return None if hits is None else [(child, found.num_tokens) for child, found in hits]

    def num_asked(self, child):
        return sum(call[0] == "lookup" for call in self.sides[child].told)


def test_all_that_have_more_than_the_local_hit_and_are_not_to_be_avoided_are_returned_in_order():
    scene = LookupScene(*(ScriptedScheduler(num_tokens=number) for number in (4, 8, 6)))
    assert scene.ask(num_local_tokens=4) == [(1, 8), (2, 6)]
    assert scene.ask("another", without={0, 1}) == [(2, 6)]
    assert [scene.num_asked(child) for child in range(3)] == [1, 1, 2]


def test_one_that_has_everything_is_not_waited_beyond():
    scene = LookupScene(ScriptedScheduler(num_tokens=12), ScriptedScheduler(pending=True))
    assert scene.ask() == [(0, 12)]
    assert scene.num_asked(1) == 0


def test_a_nearer_one_is_waited_for_and_each_answer_is_asked_for_once():
    near, far = ScriptedScheduler(pending=True), ScriptedScheduler(num_tokens=12)
    scene = LookupScene(near, far)
    assert [scene.ask(), scene.ask()] == [None, None]
    near.pending, near.num_tokens = False, 12
    assert scene.ask() == [(0, 12), (1, 12)]
    assert (scene.num_asked(0), scene.num_asked(1)) == (3, 1)


def test_one_that_never_answers_is_left_out_after_the_timeout():
    scene = LookupScene(ScriptedScheduler(pending=True), ScriptedScheduler(num_tokens=8))
    assert scene.ask() is None
    scene.clock.advance(0.9)
    assert scene.ask() is None
    scene.clock.advance(0.2)
    assert scene.ask() == [(1, 8)]
    assert scene.counters.value("lookups_total", tier="0", result="timeout") == 1


@pytest.mark.parametrize("other", [{"last": b"4"}, {}])
def test_answers_to_an_earlier_request_of_the_name_are_not_used(other):
    """The first was aborted while it waited; its prompt was another one, or it was long ago."""
    first = ScriptedScheduler(num_tokens=8)
    scene = LookupScene(first, ScriptedScheduler(pending=True))
    assert scene.ask() is None
    first.num_tokens = 0
    if not other:
        scene.clock.advance(10.0)
    assert scene.ask(**other) is None
    scene.clock.advance(1.1)
    assert scene.ask(**other) == []
