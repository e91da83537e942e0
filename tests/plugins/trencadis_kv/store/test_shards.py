"""Blocks by ranges of layers and heads: what one layout of ranks saved, another one loads, bit for bit."""

from __future__ import annotations

import itertools

import attrs
import pytest

from support.kv.store_parts import make_parts
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext
from trencadis_kv.store.settings import SharedStoreSettings, StoreSettings
from trencadis_kv.store.shards import cut_blocks
from trencadis_kv.store.store_connector import store_connector
from trencadis_testing.kv_faults import DictStore
from trencadis_testing.kv_ranks import RankedEngine, held_layouts
from trencadis_testing.kv_suite import ConnectorSuite

FOUR_HEADS = {
    "one": (4, 1, 1),
    "tp 2": (4, 2, 1),
    "tp 4": (4, 4, 1),
    "pp 2": (4, 1, 2),
    "tp 2 pp 2": (4, 2, 2),
}
TWO_HEADS = {"one": (2, 1, 1), "tp 2": (2, 2, 1), "tp 4, each head twice": (2, 4, 1), "tp 4 pp 2": (2, 4, 2)}
SHARED = {"head_groups": 4, "layer_starts": (0, 2)}


class Store:
    """A store that engines of several layouts have in common."""

    def __init__(self):
        self.objects = {}
        self.puts = []
        self._suites = []

    def engine(self, layouts, **settings):
        given = SharedStoreSettings(**settings)
        suite = ConnectorSuite()
        suite.has_threads = True
        context = ComponentContext(clock=suite.clock, seed=0)
        suite.make = lambda: store_connector(lambda: _Noted(self), given, context, name="shelf")
        self._suites.append(suite)
        return RankedEngine(suite, layouts)

    def close(self):
        for suite in self._suites:
            suite.teardown_method()


class _Noted(DictStore):
    def __init__(self, store):
        super().__init__(store.objects)
        self._puts = store.puts

    def put(self, keys, objects):
        self._puts.extend(keys)
        return super().put(keys, objects)


@pytest.fixture
def store():
    made = Store()
    yield made
    made.close()


def moves(store, written, read, *, settings=SHARED):
    """Save on ranks laid out one way, and load on ranks laid out another way."""
    store.engine(held_layouts(*written), **settings).save([1, 2, 3])
    reader = store.engine(held_layouts(*read), **settings)
    number, transfer_id = reader.find([1, 2, 3])
    return number and reader.load(transfer_id, [1, 2, 3][:number], [9, 4, 7])


@pytest.mark.representatives(9)
@pytest.mark.parametrize(("written", "read"), list(itertools.product(FOUR_HEADS, FOUR_HEADS)))
def test_any_layout_loads_what_any_other_saved(store, written, read):
    assert moves(store, FOUR_HEADS[written], FOUR_HEADS[read]) == 3


@pytest.mark.representatives(6)
@pytest.mark.parametrize(("written", "read"), list(itertools.product(TWO_HEADS, TWO_HEADS)))
def test_heads_that_several_ranks_hold_are_written_once_and_read_by_all(store, written, read):
    assert moves(store, TWO_HEADS[written], TWO_HEADS[read]) == 3
    blocks = [key for key in store.puts if not key.endswith("/layout")]
    probes = 2  # one of each engine
    assert len(blocks) == len(set(blocks)) == 3 * 2 * 2 + probes, (
        "three blocks of two ranges of layers and two of heads"
    )


def test_by_default_a_rank_writes_one_object_a_block_and_other_tensors_find_nothing(store):
    def layouts(*sizes):
        return [attrs.evolve(one, sums=f"+tp{sizes[1]}" if sizes[1] > 1 else "") for one in held_layouts(*sizes)]

    store.engine(layouts(4, 2, 1)).save([1])
    assert len({key for key in store.objects if not key.endswith("/layout")}) == 2
    assert store.engine(layouts(4, 2, 1)).find([1])[0] == 1
    assert store.engine(layouts(4, 4, 1)).find([1])[0] == 0
    assert store.engine(layouts(4, 1, 1)).find([1])[0] == 0


def test_keys_of_one_rank_are_what_they_were_before_there_were_several(store):
    (layout,) = held_layouts(4, 1, 1)
    parts = make_parts()
    assert isinstance(parts.settings, StoreSettings)
    key = "kv1/default/67e8a4b22e63e802700ebb8a4b652ddd/0.0.0-4/" + "00" * 32
    assert parts.stored([layout]).keys([bytes(32)]) == [key]
    assert attrs.evolve(parts, settings=SharedStoreSettings()).stored([layout]).keys([bytes(32)]) == [key]
    # Ranks may read it, too: one that holds less than an object reads its part.
    writer = store.engine([layout])
    writer.save([1, 2])
    reader = store.engine([attrs.evolve(one, sums="+tp4") for one in held_layouts(4, 4, 1)], head_groups=1, saves=False)
    assert reader.load(reader.find([1, 2])[1], [1, 2], [5, 6]) == 2
    stages = store.engine(held_layouts(4, 1, 2), layer_starts=(0,), saves=False)
    assert stages.load(stages.find([1, 2])[1], [1, 2], [5, 6]) == 2


def test_part_of_an_object_that_is_broken_fails_the_load_on_all_ranks_at_the_block_before(store):
    store.engine(held_layouts(4, 2, 1), **SHARED).save([1, 2, 3])
    keys = store.engine(held_layouts(4, 1, 1), **SHARED)
    third = [key for key in store.objects if key.endswith(_hash(2))]
    broken = bytearray(store.objects[third[-1]])
    broken[-1] ^= 1
    store.objects[third[-1]] = bytes(broken)
    number, transfer_id = keys.find([1, 2, 3])
    assert (number, keys.load(transfer_id, [1, 2, 3], [4, 5, 6])) == (3, 1)
    assert third[-1] not in store.objects


def _hash(number):
    from trencadis_testing.connector_harness import hashes_of

    return hashes_of([number])[0].hex()


@pytest.mark.parametrize(
    ("layouts", "settings", "message"),
    [
        (
            held_layouts(4, 2, 1),
            {"head_groups": 3},
            r"head_groups = 3: the model has 4 KV heads, .* Set it to one of: 1, 2, 4",
        ),
        (
            held_layouts(4, 4, 1),
            {"head_groups": 2},
            r"no rank holds all of KV heads 0 to 1 .* head_groups to a multiple of 4",
        ),
        (held_layouts(4, 1, 2), {"layer_starts": (0, 3)}, r"in layers 0 to 2, .* name \[0, 2\] among layer_starts"),
    ],
)
def test_ranges_that_do_not_go_are_refused_in_words(layouts, settings, message):
    with pytest.raises(ConfigValueError, match=message) as caught:
        cut_blocks(layouts, **settings, table="kv_connector.filesystem")
    assert str(caught.value).startswith("[kv_connector.filesystem] head_groups")


def test_layers_with_other_numbers_of_heads_are_cut_by_layers_only():
    (whole,) = held_layouts(4, 1, 1)
    parts = tuple(attrs.evolve(part, num_heads=2) if part.layer == 1 else part for part in whole.parts)
    layout = attrs.evolve(whole, parts=parts)
    found = cut_blocks([layout], layer_starts=(0, 1, 2), head_groups=1)
    assert [one.layout.block_bytes for one in found] == [96 * 2, 48 * 2, 192 * 2]
    with pytest.raises(ConfigValueError, match=r"in layers that differ.* Set it to 1"):
        cut_blocks([layout], head_groups=2)
