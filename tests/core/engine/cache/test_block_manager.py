from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.errors import InternalError
from trencadis.interfaces import EvictionPolicy
from trencadis_testing.engines import OldestFirst


def manager(num_blocks: int = 4) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, eviction=GuardedEviction("eviction", OldestFirst()))


def register(blocks: BlockManager, block: int, block_hash: bytes) -> None:
    blocks.register_chain([block], [block_hash], start=0, salt="", now_s=0.0)


def test_more_than_available_is_an_internal_error() -> None:
    blocks = manager()
    blocks.allocate(3)
    with pytest.raises(InternalError, match="2 blocks asked for, 1 available"):
        blocks.allocate(2)


def test_block_released_too_often_is_an_internal_error() -> None:
    blocks = manager()
    taken = blocks.allocate(1)
    blocks.release(taken, now_s=0.0)
    with pytest.raises(InternalError, match="released more often than acquired"):
        blocks.release(taken, now_s=0.0)


def test_tail_of_a_chain_is_evicted_before_its_head() -> None:
    blocks = manager()
    taken = blocks.allocate(4)
    blocks.register_chain(taken.tolist(), [bytes([depth]) for depth in range(4)], start=0, salt="", now_s=0.0)
    blocks.release(taken, now_s=0.0)
    blocks.allocate(2)
    assert blocks.longest_hit([bytes([depth]) for depth in range(4)]) == taken[:2].tolist()


def test_reset_frees_every_cached_block_and_leaves_used_ones() -> None:
    blocks = manager()
    taken = blocks.allocate(3)
    for block in taken.tolist():
        register(blocks, block, bytes([block]))
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
        blocks.exchange(held[:1], held[1:])
    with pytest.raises(InternalError):
        blocks.exchange(np.array([3], np.int32), np.array([2], np.int32))


class Diary(OldestFirst):
    """Evicts what it is told to, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[tuple[list[int], list[bytes], list[int], str, float]] = []
        self.next_victims: list[int] = []

    def on_use(self, blocks, *, keys, depths, salt, now_s) -> None:  # type: ignore[no-untyped-def]
        self.uses.append((list(blocks), list(keys), list(depths), salt, now_s))

    def victims(self, num_blocks: int) -> list[int]:
        self.forget(self.next_victims)
        return self.next_victims or super().victims(num_blocks)


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def run(blocks: BlockManager, hashes: list[bytes], *, now_s: float = 0.0) -> list[int]:
    """Let a sequence compute a chain; it holds the blocks."""
    taken: list[int] = blocks.allocate(len(hashes)).tolist()
    blocks.register_chain(taken, hashes, start=0, salt="s", now_s=now_s)
    return taken


def watched(num_blocks: int = 6) -> tuple[BlockManager, Diary]:
    diary = Diary()
    return BlockManager(num_blocks=num_blocks, eviction=GuardedEviction("eviction", diary)), diary


def test_policy_learns_what_blocks_hold_when_they_are_computed_and_when_they_are_found() -> None:
    blocks, diary = watched()
    taken = run(blocks, chain("a", "ab"), now_s=1.0)
    blocks.acquire(taken, now_s=2.0, salt="s")
    blocks.register_chain([5], chain("a", "ab", "abc"), start=2, salt="s", now_s=3.0)
    assert diary.uses == [
        (taken, chain("a", "ab"), [0, 1], "s", 1.0),
        (taken, chain("a", "ab"), [0, 1], "s", 2.0),
        ([5], chain("abc"), [2], "s", 3.0),
    ]


def test_content_kept_under_another_block_is_no_use_of_this_one() -> None:
    blocks, diary = watched()
    run(blocks, chain("a"))
    run(blocks, chain("a", "ab"))
    assert [keys for _, keys, *_ in diary.uses] == [chain("a"), chain("ab")]


def test_evicted_block_takes_along_what_can_only_be_found_through_it() -> None:
    blocks, diary = watched()
    first = run(blocks, chain("a", "ab", "abc"))
    second = run(blocks, chain("x"))
    blocks.release(np.array(first), now_s=0.0)
    blocks.release(np.array(second), now_s=0.0)
    diary.next_victims = [first[0], second[0]]
    blocks._evict(2)
    assert (blocks.num_free, blocks.num_cached) == (6, 0)
    assert not diary._candidates, "the policy was told of those that went along"
    assert not blocks._previous
    assert not blocks._successors
    diary.next_victims = []
    assert sorted(blocks.allocate(6).tolist()) == list(range(6))


def test_siblings_of_an_evicted_block_stay() -> None:
    blocks, diary = watched()
    head = run(blocks, chain("a", "ab"))
    blocks.acquire(head[:1], now_s=0.0)
    other = blocks.allocate(1).tolist()
    blocks.register_chain(other, chain("a", "ac"), start=1, salt="s", now_s=0.0)
    blocks.release(np.array(head), now_s=0.0)
    blocks.release(np.array([head[0], *other]), now_s=0.0)
    diary.next_victims = [head[1]]
    blocks._evict(1)
    assert blocks.longest_hit(chain("a", "ac")) == [head[0], other[0]]


def test_successor_in_use_becomes_unfindable_and_is_freed_by_its_sequence() -> None:
    """Two sequences computed the same head at once; one copy is kept, by the sequence that ends first."""
    blocks, diary = watched()
    first = run(blocks, chain("a"))
    second = run(blocks, chain("a", "ab"))
    blocks.release(np.array(first), now_s=0.0)
    diary.next_victims = first
    blocks._evict(1)
    assert blocks.longest_hit(chain("a", "ab")) == []
    assert (blocks.num_used, blocks.num_cached) == (2, 0)
    blocks.register_chain(blocks.allocate(1).tolist(), chain("a", "ab", "abc"), start=2, salt="s", now_s=0.0)
    assert not blocks._block_of, "nothing is registered behind a block that is gone"
    blocks.release(np.array(second), now_s=0.0)
    assert blocks.num_cached == 0


class Books(EvictionPolicy):
    """Notes every call that names a block twice, one that is no candidate, or a new one that is."""

    def __init__(self) -> None:
        self.candidates: set[int] = set()
        self.faults: list[str] = []
        self.calls: set[str] = set()

    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        self._note("on_free", blocks, not self.candidates.isdisjoint(blocks))
        self.candidates.update(blocks)

    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        self._drop("on_hit", blocks)

    def victims(self, num_blocks: int) -> list[int]:
        chosen = sorted(self.candidates, key=lambda block: block * 5 % 7)[:num_blocks]  # in no order of chains
        self.candidates.difference_update(chosen)
        return chosen

    def forget(self, blocks: Sequence[int]) -> None:
        self._drop("forget", blocks)

    def _drop(self, call: str, blocks: Sequence[int]) -> None:
        self._note(call, blocks, not self.candidates.issuperset(blocks))
        self.candidates.difference_update(blocks)

    def _note(self, call: str, blocks: Sequence[int], is_wrong: bool) -> None:
        self.calls.add(call)
        if is_wrong or len(set(blocks)) < len(blocks):
            self.faults.append(f"{call}({blocks})")


@pytest.mark.parametrize("seed", range(20))
def test_policy_is_told_of_candidates_only_and_of_each_once(seed: int) -> None:
    rng, books = random.Random(seed), Books()
    blocks = BlockManager(num_blocks=12, eviction=GuardedEviction("eviction", books))
    held: list[list[int]] = []
    for step in range(400):
        kind = rng.choice(["take", "take", "give", "give", "swap", "reset"] if step % 40 == 0 else ["take", "give"])
        if kind == "take":
            text = "".join(rng.choices("ab", k=rng.randint(1, 5)))
            wanted = chain(*(text[: i + 1] for i in range(len(text))))
            found = blocks.longest_hit(wanted) if rng.random() < 0.7 else []  # or it began before they were cached
            if blocks.num_available - blocks.num_unreferenced(found) < len(wanted) - len(found):
                continue
            blocks.acquire(found, now_s=0.0)
            own = blocks.allocate(len(wanted) - len(found)).tolist()
            blocks.register_chain(own, wanted, start=len(found), salt="", now_s=0.0)
            held.append([*found, *own])
        elif kind == "give" and held:
            blocks.release(np.array(held.pop(rng.randrange(len(held))), np.int32), now_s=0.0)
        elif kind == "swap":
            used = np.flatnonzero(blocks.ref_counts)[:2].astype(np.int32)
            idle = np.flatnonzero(blocks.ref_counts == 0)[: len(used)].astype(np.int32)
            sources = used[: len(idle)].tolist()
            blocks.exchange(used[: len(idle)], idle)
            to = dict(zip(sources, idle.tolist(), strict=True))
            held = [[to.get(block, block) for block in taken] for taken in held]
        elif kind == "reset":
            blocks.reset_cache()
        assert books.faults == []
        assert len(books.candidates) == blocks.num_cached
    assert books.calls == {"on_free", "on_hit", "forget"}


def test_swap_leaves_the_order_of_eviction_as_it_was() -> None:
    blocks = manager(6)
    ages = [run(blocks, chain(name))[0] for name in ("old", "middle", "new")]
    held = run(blocks, chain("held"))
    for block in ages:
        blocks.release(np.array([block]), now_s=0.0)
    blocks.exchange(np.array(held), np.array(ages[:1]))
    blocks.exchange(np.array(ages[:1]), np.array(ages[1:2]))
    lost = []
    for _ in range(3):
        blocks._evict(1)
        lost.append([name for name in ("old", "middle", "new") if not blocks.longest_hit(chain(name))])
    assert lost == [["old"], ["old", "middle"], ["old", "middle", "new"]]


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
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
                register(blocks, block, str(number).encode())
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
            blocks.exchange(sources, targets)
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


def test_changes_are_what_became_findable_and_what_ceased_to_be() -> None:
    blocks = manager()
    taken = blocks.allocate(3)
    register(blocks, int(taken[0]), b"a")
    assert blocks.take_changes() == ([b"a"], [])  # the first time all that is there
    register(blocks, int(taken[1]), b"b")
    register(blocks, int(taken[2]), b"c")
    assert blocks.take_changes() == ([b"b", b"c"], [])
    blocks.release(taken, now_s=0.0)
    assert blocks.take_changes() == ([], [])
    again = blocks.allocate(2)  # one is free, and one is evicted
    register(blocks, int(again[0]), b"d")
    added, removed = blocks.take_changes()
    assert (added, len(removed)) == ([b"d"], 1)
    blocks.reset_cache()
    gone = {b"a", b"b", b"c", b"d"} - set(removed)
    assert (set(blocks.take_changes()[1]), blocks.take_changes()) == (gone, ([], []))
