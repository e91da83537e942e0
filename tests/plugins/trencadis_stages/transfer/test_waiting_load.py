from __future__ import annotations

import numpy as np
import pytest

from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.engine.sequences import When
from trencadis.interfaces import Lookup
from trencadis_stages.transfer.waiting_load import WaitingLoad
from trencadis_testing.engines import OldestFirst


class Somebody:
    """As much of a sequence as a load needs to know."""

    is_approximate = False
    num_approximate_tokens = 0

    def __init__(self):
        self.block_hashes = [bytes([i]) * 32 for i in range(6)]
        self.request = self
        self.cache_salt = ""


class House:
    """As much of an engine."""

    block_size = 4

    def __init__(self):
        self.blocks = BlockManager(num_blocks=8, eviction=GuardedEviction("eviction", OldestFirst()))
        self.clock = self
        self.came = []

    def now_s(self):
        return 0.0

    def resume(self, sequence, *, front):
        assert front
        self.came.append(sequence)

    def begun(self, *, is_approximate=False):
        found = Lookup(num_tokens=20, transfer_id=7, approximate=is_approximate)
        load = WaitingLoad(self, Somebody(), found, last=5)
        load.begin(load.sequence, self.blocks.allocate(6), num_found=2)
        return load

    def load(self, load, found):
        assert (load.transfer_id, load.deadline_s) == (found.transfer_id, 0.0)

    def num_found(self, load):
        return len(self.blocks.longest_hit(load.sequence.block_hashes))


@pytest.fixture
def house():
    return House()


@pytest.mark.parametrize(("valid", "places"), [(None, 5), (12, 5), (99, 5), (11, 4), (4, 3), (3, 2), (0, 2), (-5, 2)])
def test_sequence_runs_with_the_local_hit_and_the_whole_blocks_that_came(house, valid, places):
    load = house.begun()
    load.end(house, num_valid_tokens=valid)
    assert house.came == [load.sequence]
    assert (load.num_tokens, load.when) == (4 * places, When.NOW)
    assert load.blocks is load.all_blocks
    assert house.num_found(load) == places


@pytest.mark.parametrize(("valid", "approximate"), [(None, 12), (8, 8), (0, 0)])
def test_what_is_approximate_is_told_and_found_by_nobody(house, valid, approximate):
    load = house.begun(is_approximate=True)
    load.end(house, num_valid_tokens=valid)
    assert load.sequence.num_approximate_tokens == approximate
    assert load.sequence.is_approximate is (approximate > 0)
    assert house.num_found(load) == 0


def test_connector_that_blends_is_told_the_local_hit_as_well(house):
    assert house.begun().filled == slice(2, 5)
    assert House().begun(is_approximate=True).filled == slice(0, 5)


def test_given_up_load_keeps_only_what_may_still_be_written(house):
    load, free = house.begun(), house.blocks.num_free
    kept = load.give_up(house)
    np.testing.assert_array_equal(kept, load.all_blocks[2:5])
    assert house.blocks.num_free == free + 3
