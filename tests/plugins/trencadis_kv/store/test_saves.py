from __future__ import annotations

import numpy as np
import pytest

from support.kv.store_parts import BLOCK_BYTES, GatedStore, OnlyBackendThread, hashes_of, make_parts, make_pool, read
from trencadis.errors import TransferError
from trencadis_kv.store.messages import SaveOrder
from trencadis_kv.store.saves import Saves
from trencadis_kv.store.shards import RankShard
from trencadis_kv.store.staging import Staging
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


def test_what_is_stored_already_is_not_written_again(house):
    one = house()
    one.stage([1, 2])
    one.settle()
    one.store.put = lambda keys, objects: pytest.fail("written twice")
    one.stage([1, 2])
    one.settle()
    assert one.parts.counters.value("tokens_total", direction="save") == 8


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


def test_what_finds_no_room_beside_a_write_under_way_is_dropped(house):
    one = house(gated=True, staged_blocks=1)
    one.stage([0])
    assert one.store.is_waiting.wait(60.0)
    one.stage([1])
    assert one.forgotten([1]) == [1]
    one.store.open()
    one.settle()
    assert one.stored([0, 1]) == [0]


def test_block_larger_than_the_staging_memory_is_dropped(house):
    one = house(staged_blocks=0.5)
    one.stage([0])
    one.settle()
    assert one.dropped("staging") == 1
    assert one.objects == {}


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
    assert one.dropped("unreachable") == 2
    assert one.forgotten([1, 2]) == [1, 2]
    assert one.parts.breaker.allows
    one.stage([3])
    one.settle()
    assert not one.parts.breaker.allows


def test_codec_that_raises_costs_the_save_alone(house):
    one = house()
    one.packing.pack = lambda block_hash, payload: 1 / 0
    one.stage([1])
    one.settle()
    assert one.dropped("raised") == 1


def test_store_that_is_left_alone_is_not_written_to(house):
    one = house(gated=True)
    one.parts.breaker.open()
    one.stage([1])
    one.settle()
    assert one.store.calls == []
    assert one.dropped("cancelled") == 1


def test_pool_that_raises_costs_the_save_alone(house):
    one = house()
    one.pool.read_blocks = lambda blocks, out: 1 / 0
    one.stage([1])
    one.settle()
    assert one.dropped("raised") == 1
    assert one.staging.num_bytes == 0


def test_blocks_are_read_on_the_backends_thread_alone(house):
    one = house(pool=OnlyBackendThread(make_pool()))
    one.stage([1, 2])
    one.settle()
    assert one.stored([1, 2]) == [1, 2]


def test_closing_writes_what_is_staged(house):
    one = house(gated=True)
    one.stage([1])
    one.stage([2])
    one.store.open()
    one.saves.close(10.0)
    assert one.stored([1, 2]) == [1, 2]


def test_closing_does_not_wait_for_a_store_that_hangs(house):
    one = house(gated=True)
    one.stage([1])
    assert one.store.is_waiting.wait(60.0)
    one.stage([2])
    one.saves.close(0.05)
    assert one.dropped("closed") == 1
    one.settle()
    assert one.objects == {}


def test_closed_saves_stage_nothing(house):
    one = house()
    one.saves.close(1.0)
    one.stage([1])
    assert one.staging.num_bytes == 0


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


def test_layers_of_one_step_are_not_those_of_the_next(house):
    one = house()
    by_layer(one, [3])
    one.saves.copy_layer(0)
    one.saves.copy_layer(1)
    one.saves.finish()
    by_layer(one, [4])
    one.saves.copy_layer(1)
    one.saves.finish()
    one.settle()
    assert one.stored([3, 4]) == [3]


def test_layer_that_cannot_be_read_costs_the_save_alone(house):
    one = house()
    one.pool.read_layer = lambda layer, blocks, out: 1 / 0
    by_layer(one, [1])
    for layer in (0, 1):
        one.saves.copy_layer(layer)
    one.saves.finish()
    one.settle()
    assert (one.dropped("raised"), one.forgotten([1]), one.objects) == (1, [1], {})
    assert one.parts.counters.value("transfer_failures_total", cause="raised") == 1


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


def test_closing_in_a_step_drops_what_is_being_copied(house):
    one = house(gated=True)
    occupy(one)
    by_layer(one, [1])
    one.saves.copy_layer(0)
    one.saves.close(0.05)
    assert one.dropped("unasked") == 1
    assert one.forgotten([1]) == [1]


def test_closed_saves_copy_no_layer(house):
    one = house()
    one.saves.close(1.0)
    by_layer(one, [1])
    one.saves.finish()
    assert one.objects == {}


def test_pool_of_one_thread_is_not_copied_by_layer(house):
    assert house().saves.by_layer
    pool = make_pool()
    pool.any_thread = False
    assert not house(pool=pool).saves.by_layer
    pool = make_pool()
    pool.layerwise = False
    assert not house(pool=pool).saves.by_layer
