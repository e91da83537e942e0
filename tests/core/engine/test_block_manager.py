from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

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


def test_a_block_that_is_free_cannot_be_swapped_nor_one_in_use_be_a_target() -> None:
    blocks = manager()
    held = blocks.allocate(2)
    with pytest.raises(InternalError):
        blocks.swap(held[:1], held[1:], now_s=0.0)
    with pytest.raises(InternalError):
        blocks.swap(np.array([3], np.int32), np.array([2], np.int32), now_s=0.0)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(moves=st.lists(st.tuples(st.sampled_from(["take", "give", "hit", "swap"]), st.integers(0, 99)), max_size=40))
def test_swaps_carry_contents_hashes_and_counts_along(moves: list[tuple[str, int]]) -> None:
    """Model: every block has a content; whatever is found by hash or held must still have the content it had."""
    size = 8
    blocks = manager(size)
    content = [0] * size
    held: list[tuple[int, int]] = []  # block, content
    number = 0
    for kind, pick in moves:
        if kind == "take" and blocks.num_available:
            number += 1
            block = int(blocks.allocate(1)[0])
            content[block] = number
            held.append((block, number))
            if pick % 2:
                blocks.register(block, str(number).encode(), depth=pick)
        elif kind == "give" and held:
            block, _ = held.pop(pick % len(held))
            blocks.release(np.array([block], np.int32), now_s=0.0)
        elif kind == "hit" and number:
            wanted = 1 + pick % number
            found = blocks.longest_hit([str(wanted).encode()])
            if found:
                assert content[found[0]] == wanted
                blocks.acquire(found, now_s=0.0)
                held.append((found[0], wanted))
        elif kind == "swap":
            used = np.unique(np.array([block for block, _ in held], np.int32))[::-1]
            others = np.setdiff1d(np.arange(size, dtype=np.int32), used)
            count = min(len(used), len(others), 1 + pick % 3)
            sources, targets = used[:count], others[:count]
            blocks.swap(sources, targets, now_s=0.0)
            to = dict(zip(sources.tolist(), targets.tolist(), strict=True))
            for source, target in to.items():
                content[source], content[target] = content[target], content[source]
            held = [(to.get(block, block), mark) for block, mark in held]
        assert all(content[block] == mark for block, mark in held)
        counts = np.bincount([block for block, _ in held], minlength=size)
        assert blocks.ref_counts.tolist() == counts.tolist()
        assert blocks.num_free + blocks.num_cached + blocks.num_used == size
    for wanted in range(1, number + 1):
        for found_block in blocks.longest_hit([str(wanted).encode()]):
            assert content[found_block] == wanted
    everything = blocks.allocate(blocks.num_available)
    assert sorted([*everything.tolist(), *{block for block, _ in held}]) == list(range(size))
