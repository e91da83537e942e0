from __future__ import annotations

import tempfile

import attrs
import pytest

from support.kv.tiered_children import RaisingWorker, loop, raising, tiers
from trencadis.clock import SimulatedClock
from trencadis.errors import ContractError, TrencadisError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.codecs.zstd import Zstd
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.filesystem.connector import make_filesystem
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.host_offload.connector import make_host_offload
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.connectors.tiered.connector import make_tiered
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.policies.always import Always
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
        return self.tiers(broken=attrs.evolve(broken, worker=_Deaf()), far=whole)

    def lose(self, pair):
        self.children[-1].worker._store.blocks.clear()


class _Deaf(RaisingWorker):
    """As a worker side whose process is gone."""


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


@pytest.mark.parametrize(
    "values",
    [
        {"children": ()},
        {"children": ("a", "b", "a")},
        {"children": (1,)},
        {"lookup_timeout_s": 0.0},
        {"release_timeout_s": 0.0},
        {"failure_limit": 0},
        {"failure_window_s": 0.0},
        {"cooldown_s": 0.0},
    ],
)
def test_values_out_of_range_are_refused(values):
    with pytest.raises((ValueError, TypeError), match=next(iter(values))):
        TieredConfig(**values)
