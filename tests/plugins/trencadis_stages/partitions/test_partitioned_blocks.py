"""KV blocks in partitions: nothing of one is given to a sequence of another, and counts are exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.errors import InternalError
from trencadis_stages.partitions.partitioned_blocks import PartitionedBlocks
from trencadis_testing.engines import OldestFirst

SIZE, HASHES = 6, [bytes([depth]) for depth in range(8)]
"""Blocks of a partition, and hashes of one text, of which all sequences have a beginning."""


def partitions(number: int = 3) -> PartitionedBlocks:
    evictions = [GuardedEviction("eviction", OldestFirst()) for _ in range(number)]
    return PartitionedBlocks(num_blocks=number * SIZE, evictions=evictions)


@settings(max_examples=60)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["start", "start", "end", "reset"]), st.integers(0, 2), st.integers(1, SIZE)),
        max_size=40,
    )
)
def test_partitions_keep_what_they_have_to_themselves(moves: list[tuple[str, int, int]]) -> None:
    """Model: for each partition the prefixes that it was shown since they could last be evicted, and who holds which blocks."""
    blocks = partitions()
    held: list[tuple[int, list[int]]] = []
    shown = [0, 0, 0]  # longest prefix that a partition can have
    for kind, number, length in moves:
        part = blocks.parts[number]
        if kind == "start":
            found = part.longest_hit(HASHES[:length])
            assert len(found) <= shown[number], "found where it was never computed"
            if length - len(found) + part.num_unreferenced(found) > part.num_available:
                continue
            if found:
                blocks.acquire(found, now_s=0.0)
            own = [*found, *part.allocate(length - len(found)).tolist()]
            assert set(own) <= set(range(number * SIZE, number * SIZE + SIZE)), "a block of another partition"
            blocks.register_chain(own[len(found) :], HASHES, start=len(found), salt="", now_s=0.0)
            shown[number] = max(shown[number], length)
            held.append((number, own))
        elif kind == "end" and held:
            _, own = held.pop(length % len(held))
            blocks.release(np.array(own, np.int32), now_s=0.0)
        elif kind == "reset":
            blocks.reset_cache()
            shown = [0, 0, 0]
        counts = np.bincount([one for _, own in held for one in own], minlength=3 * SIZE)
        assert blocks.ref_counts.tolist() == counts.tolist()
        for index, one in enumerate(blocks.parts):
            used = np.count_nonzero(counts[index * SIZE : index * SIZE + SIZE])
            assert one.num_available == SIZE - used
        assert blocks.num_available == 3 * SIZE - np.count_nonzero(counts)
        assert blocks.num_free + blocks.num_cached == blocks.num_available
        now = blocks.inspect()
        assert sorted([*now.free, *now.cached, *np.flatnonzero(counts).tolist()]) == list(range(3 * SIZE))
        longest = max(len(one.longest_hit(HASHES)) for one in blocks.parts)
        assert len(blocks.longest_hit(HASHES)) == longest


def test_changes_of_all_partitions_are_told_and_a_hash_is_lost_when_none_has_it() -> None:
    blocks = partitions(2)
    assert blocks.take_changes() == ([], [])
    taken = [part.allocate(1) for part in blocks.parts]
    for one in taken:
        blocks.register_chain(one.tolist(), [b"same"], start=0, salt="", now_s=0.0)
    assert blocks.take_changes() == ([b"same"], [])
    blocks.release(taken[0], now_s=0.0)
    blocks.parts[0].allocate(SIZE)  # evicts it there
    assert blocks.take_changes() == ([b"same"], []), "the other partition has it still"
    blocks.release(taken[1], now_s=0.0)
    blocks.parts[1].allocate(SIZE)
    assert blocks.take_changes() == ([], [b"same"])


def test_blocks_of_no_partition_are_not_given() -> None:
    with pytest.raises(InternalError, match="1 blocks asked for of no partition"):
        partitions().allocate(1)
