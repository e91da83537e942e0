from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

from support.kv.store_parts import BLOCK_BYTES, GatedStore, hashes_of, make_parts, make_pool, read
from trencadis.errors import TransferError
from trencadis.records import KVLayout, KVPart
from trencadis_kv.store.layer_copy import LayerCopy, layer_places
from trencadis_kv.store.messages import SaveOrder
from trencadis_kv.store.saves import Saves
from trencadis_kv.store.shards import RankShard
from trencadis_kv.store.staging import Staging, runs
from trencadis_testing.kv_faults import DictStore


class House:
    def __init__(self, *, gated=False, staged_blocks=100, pool=None, **settings):
        self.objects = {}
        self.store = GatedStore(self.objects) if gated else DictStore(self.objects)
        self.parts = make_parts(lambda: self.store, **settings)
        self.pool = pool or make_pool()
        self.packing = self.parts.objects(self.pool.layout)
        self.staging = Staging(int(staged_blocks * BLOCK_BYTES))
        self.saves = Saves(self.parts, self.pool, [RankShard(objects=self.packing)], self.staging)

    def stage(self, blocks):
        hashes = hashes_of(*blocks)
        self.parts.recent.add(hashes)
        self.saves.stage(SaveOrder(list(blocks), hashes))
        return hashes

    def settle(self):
        assert self.parts.activity.wait_idle(60.0)

    def stored(self, blocks):
        """Return those of the blocks whose right content is stored."""
        found = []
        for block, key in zip(blocks, self.packing.keys(hashes_of(*blocks)), strict=True):
            out = bytearray(BLOCK_BYTES)
            if key in self.objects:
                self.packing.unpack(hashes_of(block)[0], memoryview(self.objects[key]), memoryview(out))
                assert bytes(out) == read(self.pool, [block]).tobytes()
                found.append(block)
        return found

    def forgotten(self, blocks):
        """Return those of the blocks that are worth saving again."""
        return [blocks[i] for i in self.parts.recent.unknown(hashes_of(*blocks))]

    def dropped(self, reason):
        return self.parts.counters.value("dropped_saves_total", reason=reason)


@pytest.fixture
def house():
    made = []

    def make(**options):
        made.append(House(**options))
        return made[-1]

    yield make
    for one in made:
        one.saves.close(1.0)
        assert one.staging.num_bytes == 0, "staging memory leaks"


def test_blocks_are_saved_as_they_are_when_they_are_staged(house):
    one = house(gated=True)
    one.stage([3, 9, 5])
    before = read(one.pool, [3, 9, 5])
    one.pool.write_blocks([3, 9, 5], 255 - before)
    one.store.open()
    one.settle()
    one.pool.write_blocks([3, 9, 5], before)
    assert one.stored([3, 9, 5]) == [3, 9, 5]
    assert one.parts.counters.value("tokens_total", direction="save") == 12
    assert one.parts.counters.value("bytes_total", direction="save") == 3 * (128 + BLOCK_BYTES)


def test_only_the_missing_tail_is_written(house):
    one = house()
    one.stage([1, 2])
    one.settle()
    put, written = one.store.put, []
    one.store.put = lambda keys, objects: written.append(len(keys)) or put(keys, objects)
    one.stage([1, 2, 3, 4])
    one.settle()
    assert written == [2]
    assert one.stored([1, 2, 3, 4]) == [1, 2, 3, 4]


def test_store_that_is_too_slow_loses_the_oldest_that_wait(house):
    one = house(gated=True, staged_blocks=4)
    one.stage([0])
    assert one.store.is_waiting.wait(60.0)
    for block in (1, 2, 3, 4, 5):
        one.stage([block])
    assert one.staging.fraction == 1.0
    assert one.dropped("staging") == 2
    assert one.forgotten([0, 1, 2, 3, 4, 5]) == [1, 2]
    one.store.open()
    one.settle()
    assert one.stored([0, 1, 2, 3, 4, 5]) == [0, 3, 4, 5]


def test_block_larger_than_the_staging_memory_is_dropped_and_a_store_that_is_left_alone_not_written_to(house):
    one, alone = house(staged_blocks=0.5), house(gated=True)
    one.stage([0])
    one.settle()
    assert (one.dropped("staging"), one.objects) == (1, {})
    alone.parts.breaker.open()
    alone.stage([1])
    alone.settle()
    assert (alone.dropped("cancelled"), alone.store.calls) == (1, [])


def test_full_store_is_no_failure_of_the_store(house):
    one = house(failure_limit=1)
    one.store.put = lambda keys, objects: 1
    one.stage([1, 2, 3])
    one.settle()
    assert one.dropped("full") == 2
    assert one.parts.counters.value("transfer_failures_total", cause="full") == 1
    assert one.parts.breaker.allows
    assert one.parts.counters.value("tokens_total", direction="save") == 4


@pytest.mark.parametrize("call", ["contains", "put"])
def test_save_that_fails_is_dropped_and_counted(house, call):
    one = house(failure_limit=2)

    def fail(*_):
        raise TransferError("gone", cause="unreachable")

    setattr(one.store, call, fail)
    one.stage([1, 2])
    one.settle()
    assert (one.dropped("unreachable"), one.forgotten([1, 2]), one.parts.breaker.allows) == (2, [1, 2], True)
    one.stage([3])
    one.settle()
    assert not one.parts.breaker.allows


@pytest.mark.parametrize(("part", "call"), [("packing", "pack"), ("pool", "read_blocks"), ("pool", "read_layer")])
@pytest.mark.representatives(3)
def test_codec_or_pool_that_raises_costs_the_save_alone(house, part, call):
    one = house()
    setattr(getattr(one, part), call, lambda *_: 1 / 0)
    (by_layer if call == "read_layer" else House.stage)(one, [1])
    for layer in (0, 1):
        one.saves.copy_layer(layer)
    one.saves.finish()
    one.settle()
    assert (one.dropped("raised"), one.forgotten([1]), one.objects) == (1, [1], {})
    assert one.parts.counters.value("transfer_failures_total", cause="raised") == 1


def test_closing_writes_what_is_staged_and_does_not_wait_for_a_store_that_hangs(house):
    one, hangs = house(gated=True), house(gated=True)
    one.stage([1])
    one.stage([2])
    one.store.open()
    one.saves.close(10.0)
    assert one.stored([1, 2]) == [1, 2]
    occupy(hangs)
    hangs.stage([2])
    by_layer(hangs, [1])
    hangs.saves.copy_layer(0)
    hangs.saves.close(0.05)
    assert (hangs.dropped("closed"), hangs.dropped("unasked"), hangs.forgotten([1])) == (1, 1, [1])
    hangs.settle()
    assert hangs.objects == {}


# -------------------------------------------------------------------------------------------------- by layer
def by_layer(one, blocks):
    hashes = hashes_of(*blocks)
    one.parts.recent.add(hashes)
    one.saves.stage(SaveOrder(list(blocks), hashes), by_layer=True)


def occupy(one):
    """Have the only thread at work, so that the step copies by itself; needs a gated store."""
    one.stage([15])
    assert one.store.is_waiting.wait(60.0)


@pytest.mark.parametrize("threads_help", [True, False])
def test_layers_are_saved_as_they_are_when_they_are_waited_for(house, threads_help):
    one = house(gated=True)
    if not threads_help:
        occupy(one)
    blocks = [3, 9, 5]
    before = read(one.pool, blocks)
    by_layer(one, blocks)
    for layer in (0, 1):
        assert one.saves.is_copying
        one.saves.copy_layer(layer)
        one.pool.write_layer(layer, blocks, np.zeros((3, BLOCK_BYTES // 2), np.uint8))
    one.saves.finish()
    assert not one.saves.is_copying
    one.store.open()
    one.settle()
    one.pool.write_blocks(blocks, before)
    assert one.stored(blocks) == blocks


@pytest.mark.parametrize("waited", [(), (0,), (1,)])
@pytest.mark.parametrize("threads_help", [True, False])
def test_what_a_step_did_not_ask_for_is_not_saved(house, waited, threads_help):
    one = house(gated=True)
    if not threads_help:
        occupy(one)
    by_layer(one, [3, 4])
    for layer in waited:
        one.saves.copy_layer(layer)
    one.saves.finish()
    assert (one.dropped("unasked"), one.forgotten([3, 4])) == (2, [3, 4])
    one.store.open()
    one.settle()
    assert one.stored([3, 4]) == []


def test_room_is_made_at_the_cost_of_what_waits_not_of_what_is_being_copied(house):
    one = house(gated=True, staged_blocks=4)
    occupy(one)
    one.stage([0])
    for block in (1, 2, 3, 4):
        by_layer(one, [block])
    for layer in (0, 1):
        one.saves.copy_layer(layer)
    one.saves.finish()
    assert (one.dropped("staging"), one.forgotten([0, 1, 2, 3, 4])) == (2, [0, 4])
    one.store.open()
    one.settle()
    assert one.stored([0, 1, 2, 3, 4, 15]) == [1, 2, 3, 15]


def test_pool_of_one_thread_is_not_copied_by_layer(house):
    assert house().saves.by_layer
    pool = make_pool()
    pool.any_thread = False
    assert not house(pool=pool).saves.by_layer
    pool = make_pool()
    pool.layerwise = False
    assert not house(pool=pool).saves.by_layer


def staging_of(num_slots):
    staging = Staging(num_slots * 8 + 7)
    staging.open(8)
    return staging


def test_slots_are_taken_once_until_they_are_given_back():
    staging = staging_of(5)
    assert staging.num_slots == 5
    first, second = staging.take(3), staging.take(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert staging.take(1) == []
    staging.give_back(second)
    assert staging.take(3) == []
    assert sorted(staging.take(2)) == sorted(second)


def test_memory_that_was_used_last_is_used_first_and_in_one_run():
    staging = staging_of(100)
    slots = staging.take(7)
    assert list(runs(slots)) == [(0, slots[0], slots[0] + 7)]
    staging.give_back(slots)
    assert staging.take(7) == slots


def test_memory_smaller_than_a_block_has_no_slots():
    staging = Staging(7)
    staging.open(8)
    assert staging.take(1) == []
    assert staging.fraction == 1.0


def test_closed_memory_goes_back_to_the_system_and_still_tells_who_keeps_slots():
    staging = staging_of(4)
    slots = staging.take(3)
    memory = weakref.ref(staging._memory)
    view = staging.rows(0, 1)
    staging.give_back(slots[:1])
    staging.close()
    staging.close()
    assert memory() is not None, "somebody looks at it"
    del view
    assert memory() is None
    assert staging.take(1) == []
    assert staging.num_bytes == 16
    staging.give_back(slots[1:])
    assert staging.num_bytes == 0
    assert staging.take(1) == []


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], []),
        ([3], [(0, 3, 4)]),
        ([3, 4, 5, 9, 8, 1, 2], [(0, 3, 6), (3, 9, 10), (4, 8, 9), (5, 1, 3)]),
    ],
)
def test_runs_are_of_consecutive_slots(slots, expected):
    assert list(runs(slots)) == expected


def part(layer, kind, head_dim=2):
    return KVPart(layer=layer, kind=kind, num_heads=1, head_dim=head_dim, dtype="float32", item_bytes=4)


def copy_of(pool, blocks):
    """Return a copy to two pieces of memory, and these."""
    out = np.zeros((len(blocks), BLOCK_BYTES), np.uint8)
    return LayerCopy(pool, blocks, [(0, out[:1]), (1, out[1:])], layer_places(pool.layout)), out


def test_places_of_keys_and_values_that_lie_apart():
    layout = KVLayout(
        parts=(part(3, "key"), part(5, "key", 4), part(3, "value"), part(5, "value", 4)),
        block_size=2,
        last_head=1,
        numerics="n",
    )
    assert layer_places(layout) == {
        3: [(slice(0, 16), slice(0, 16)), (slice(48, 64), slice(16, 32))],
        5: [(slice(16, 48), slice(0, 32)), (slice(64, 96), slice(32, 64))],
    }


def test_layer_is_copied_once():
    pool = make_pool()
    before = read(pool, [3, 4])
    copy, out = copy_of(pool, [3, 4])
    copy.copy(0)
    pool.write_blocks([3, 4], 255 - before)
    copy.run(None)
    half = BLOCK_BYTES // 2
    assert (out[:, :half] == before[:, :half]).all()
    assert (out[:, half:] == 255 - before[:, half:]).all()


def test_pool_that_raises_ends_the_copy():
    pool = make_pool()
    read_layer, asked = pool.read_layer, []

    def raises_once(layer, blocks, out):
        asked.append(layer)
        if len(asked) == 1:
            raise OSError("lost")
        read_layer(layer, blocks, out)

    pool.read_layer = raises_once
    copy, _ = copy_of(pool, [3, 4])
    copy.run(None)
    copy.copy(1)
    assert asked == [0]
    assert str(copy.error) == "lost"


@pytest.mark.parametrize("waits_for", ["copy", "give_up"])
def test_who_comes_second_waits_for_the_first(waits_for):
    pool = make_pool()
    read_layer, is_reading, may_read = pool.read_layer, threading.Event(), threading.Event()

    def slow(layer, blocks, out):
        is_reading.set()
        assert may_read.wait(60.0)
        read_layer(layer, blocks, out)

    pool.read_layer = slow
    copy, out = copy_of(pool, [3, 4])
    first = threading.Thread(target=copy.copy, args=(0,))
    first.start()
    assert is_reading.wait(60.0)
    seen = []
    call = (lambda: copy.copy(0)) if waits_for == "copy" else copy.give_up
    second = threading.Thread(target=lambda: (call(), seen.append(bool(out[:, : BLOCK_BYTES // 2].any()))))
    second.start()
    assert seen == []
    may_read.set()
    first.join(60.0)
    second.join(60.0)
    assert seen == [True]
