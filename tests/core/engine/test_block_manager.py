from __future__ import annotations

import numpy as np
import pytest

from trencadis.engine.block_manager import BlockManager
from trencadis.engine.guards import GuardedEviction
from trencadis.errors import InternalError
from trencadis_testing.engines import OldestFirst


def manager(num_blocks: int = 4) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, eviction=GuardedEviction("eviction", OldestFirst()))


def test_allocated_blocks_are_distinct_and_counted_as_used() -> None:
    blocks = manager()
    taken = blocks.allocate(3)
    assert len(set(taken.tolist())) == 3
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (1, 0, 3)


def test_more_than_available_is_an_internal_error() -> None:
    blocks = manager()
    blocks.allocate(3)
    with pytest.raises(InternalError, match="2 blocks asked for, 1 available"):
        blocks.allocate(2)


def test_release_frees_blocks_without_hash_and_keeps_those_with_one() -> None:
    blocks = manager()
    taken = blocks.allocate(2)
    blocks.register(int(taken[0]), b"head", depth=0)
    blocks.release(taken, now_s=0.0)
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (3, 1, 0)
    assert blocks.longest_hit([b"head", b"tail"]) == [int(taken[0])]


def test_block_released_too_often_is_an_internal_error() -> None:
    blocks = manager()
    taken = blocks.allocate(1)
    blocks.release(taken, now_s=0.0)
    with pytest.raises(InternalError, match="released more often than acquired"):
        blocks.release(taken, now_s=0.0)


def test_shared_block_stays_until_the_last_holder_lets_go() -> None:
    blocks = manager()
    taken = blocks.allocate(1)
    blocks.register(int(taken[0]), b"h", depth=0)
    blocks.acquire(taken.tolist(), now_s=0.0)
    blocks.release(taken, now_s=0.0)
    assert blocks.num_used == 1
    blocks.release(taken, now_s=0.0)
    assert (blocks.num_used, blocks.num_cached) == (0, 1)


def test_tail_of_a_chain_is_evicted_before_its_head() -> None:
    blocks = manager()
    taken = blocks.allocate(4)
    for depth, block in enumerate(taken.tolist()):
        blocks.register(block, bytes([depth]), depth=depth)
    blocks.release(taken, now_s=0.0)
    blocks.allocate(2)
    assert blocks.longest_hit([bytes([depth]) for depth in range(4)]) == taken[:2].tolist()


def test_hit_takes_a_block_out_of_the_candidates() -> None:
    blocks = manager(2)
    taken = blocks.allocate(2)
    blocks.register(int(taken[0]), b"a", depth=0)
    blocks.register(int(taken[1]), b"b", depth=0)
    blocks.release(taken, now_s=0.0)
    blocks.acquire([int(taken[1])], now_s=0.0)
    assert blocks.allocate(1).tolist() == [int(taken[0])]
    assert blocks.num_available == 0


def test_same_content_is_kept_once() -> None:
    blocks = manager()
    taken = blocks.allocate(2)
    assert blocks.register(int(taken[0]), b"same", depth=0)
    assert not blocks.register(int(taken[1]), b"same", depth=0)
    blocks.release(taken, now_s=0.0)
    assert (blocks.num_free, blocks.num_cached) == (3, 1)


def test_reset_frees_every_cached_block_and_leaves_used_ones() -> None:
    blocks = manager()
    taken = blocks.allocate(3)
    for block in taken.tolist():
        blocks.register(block, bytes([block]), depth=0)
    blocks.release(taken[:2], now_s=0.0)
    assert blocks.reset_cache() == 2
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (3, 0, 1)
    assert blocks.longest_hit([bytes([int(taken[2])])]) == []
    blocks.release(np.array(taken[2:]), now_s=0.0)
    assert blocks.num_free == 4
