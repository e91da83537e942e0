"""Conformance suite of the noun ``eviction``."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from trencadis.interfaces import EvictionPolicy, legal
from trencadis_testing.hash_seeds import same_under_other_hashes
from trencadis_testing.resources import call_s, ends_its_threads, growth_bytes

__all__ = ["EvictionConformance"]

_NUM_BLOCKS = 48
_NUM_CONTENTS = 96
_SEEDS = range(8)
_MANY = 32_000
_COST_RATIO = 8
"""A victim among 32 times as many candidates may take so many times as long: O(log n) is below 2, O(n) is 32."""

_MAX_GROWTH_BYTES = 16.0
"""For each content that came and went: a policy that keeps a key keeps more than 50."""


class EvictionConformance:
    """What every eviction policy must do; inherit from it, and set ``make``.

    Random but repeatable histories of an engine's calls run beside the set of blocks that are candidates at each
    moment. Some blocks are used before they are freed, and contents that were evicted come back in other blocks. Which
    candidate goes first is the policy's own affair. Example::

        class TestLfu(EvictionConformance):
            make = Lfu
    """

    def make(self) -> EvictionPolicy:
        """Return a new policy without candidates."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourPolicy, or a method make(self)")

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_victims_are_as_many_candidates_as_asked_for_and_each_once(self, seed: int) -> None:
        """A block that a sequence reads, or that is free already, must never be evicted."""
        run = _Run(self.make(), seed)
        for done in run.operations(200):
            legal(EvictionPolicy.victims, done.victims, done.num_wanted)
            wrong = set(done.victims) - done.candidates
            assert not wrong, f"no candidates, but evicted: {sorted(wrong)}"

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_every_candidate_is_evicted_in_the_end(self, seed: int) -> None:
        """A candidate that is lost is memory that is lost."""
        run = _Run(self.make(), seed)
        for _ in run.operations(60):
            pass
        remaining = run.policy.victims(len(run.candidates)) if run.candidates else []
        assert set(remaining) == run.candidates, f"never evicted: {sorted(run.candidates - set(remaining))}"

    @pytest.mark.parametrize("kept", [1, 2, 3])
    def test_hit_blocks_are_no_candidates_until_they_are_freed_again(self, kept: int) -> None:
        """A hit means that a sequence reads the block."""
        policy = self.make()
        policy.on_free([3, 2, 1], depths=[2, 1, 0], now_s=0.0)
        hit = sorted({1, 2, 3} - {kept})
        policy.on_hit(hit, now_s=1.0)
        assert policy.victims(1) == [kept], "a hit block was evicted while it was in use"
        policy.on_free(hit[::-1], depths=[1, 0], now_s=2.0)
        assert sorted(policy.victims(2)) == hit, "a block that was freed again is no candidate"

    @pytest.mark.parametrize("kept", [1, 2, 3])
    def test_forgotten_blocks_are_no_candidates(self, kept: int) -> None:
        """The core took them away, and may have given them to a sequence."""
        policy = self.make()
        policy.on_free([3, 2, 1], depths=[2, 1, 0], now_s=0.0)
        policy.forget(sorted({1, 2, 3} - {kept}))
        assert policy.victims(1) == [kept], "a forgotten block was evicted"

    def test_evicted_blocks_may_become_candidates_again(self) -> None:
        """Block ids are few and live many lives."""
        policy = self.make()
        for life in range(3):
            policy.on_free([7], depths=[0], now_s=float(life))
            assert policy.victims(1) == [7], f"block 7 was not evicted in its life number {life + 1}"

    def test_blocks_of_equal_depth_and_time_are_all_candidates(self) -> None:
        """Many sequences end in one step, and all have a block at depth 0."""
        policy = self.make()
        for block in (4, 2, 9):
            policy.on_free([block], depths=[0], now_s=1.0)
        assert sorted(policy.victims(3)) == [2, 4, 9]

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_same_calls_give_the_same_victims(self, seed: int) -> None:
        """Replay and ranks must agree: no wall clock, no global random source."""
        first, second = _Run(self.make(), seed), _Run(self.make(), seed)
        for one, other in zip(first.operations(80), second.operations(80), strict=True):
            assert one.victims == other.victims, f"two policies, one history: {one.victims} and {other.victims}"

    def test_same_victims_in_a_process_that_hashes_differently(self) -> None:
        """Ranks and replays are other processes: no order of a set of keys or salts."""
        same_under_other_hashes(self, "_victims")

    def _victims(self) -> list[list[int]]:
        return [done.victims for seed in _SEEDS for done in _Run(self.make(), seed).operations(80)]

    def test_uses_make_no_candidates(self) -> None:
        """Blocks are told of while sequences hold them."""
        policy = self.make()
        policy.on_use([1, 2, 3], keys=[b"1", b"2", b"3"], depths=[0, 1, 2], salt="", now_s=0.0)
        policy.on_free([3], depths=[2], now_s=1.0)
        policy.on_use([1, 2], keys=[b"1", b"2"], depths=[0, 1], salt="", now_s=2.0)
        assert policy.victims(1) == [3], "a block was evicted that is in use"
        policy.on_free([2, 1], depths=[1, 0], now_s=3.0)
        assert sorted(policy.victims(2)) == [1, 2], "a used block that was freed is no candidate"

    def test_contents_come_back_after_eviction_in_any_block(self) -> None:
        """What a policy remembers of a content must not lose the block that holds it now."""
        policy = self.make()
        for life in range(12):
            block, other = 5 + life % 2, 8 + life % 3
            policy.on_use([block, other], keys=[b"same", bytes([life])], depths=[0, 1], salt="", now_s=float(life))
            policy.on_free([other, block], depths=[1, 0], now_s=life + 0.5)
            assert sorted(policy.victims(2)) == [block, other], f"lost in life number {life + 1}"

    def test_a_used_block_may_turn_to_other_content_unseen(self) -> None:
        """A sequence holds a block that no look-up can reach any more: it is freed and filled again without a word."""
        policy = self.make()
        policy.on_use([1], keys=[b"old"], depths=[3], salt="", now_s=0.0)
        policy.on_use([1], keys=[b"new"], depths=[0], salt="", now_s=1.0)
        policy.on_free([1], depths=[0], now_s=2.0)
        assert policy.victims(1) == [1]
        policy.on_free([2], depths=[0], now_s=3.0)
        assert policy.victims(1) == [2], "an old content of a block is still a candidate"

    def test_empty_calls_are_harmless(self) -> None:
        """A sequence without full blocks frees nothing."""
        policy = self.make()
        policy.on_use([], keys=[], depths=[], salt="", now_s=0.0)
        policy.on_free([], depths=[], now_s=0.0)
        policy.on_hit([], now_s=0.0)
        policy.forget([])
        policy.on_free([4], depths=[0], now_s=0.0)
        assert policy.victims(1) == [4]

    def test_a_victim_costs_no_more_among_many_candidates(self) -> None:
        """``victims`` is O(num_blocks log n): a cache has up to a million blocks, and every allocation waits for it."""
        few_s, many_s = (self._victim_s(num_blocks) for num_blocks in (_MANY // 32, _MANY))
        assert many_s < _COST_RATIO * few_s + 5e-6, (
            f"victims(1) takes {few_s * 1e6:.1f} µs among {_MANY // 32} candidates, {many_s * 1e6:.1f} µs among {_MANY}"
        )

    def test_nothing_is_kept_of_contents_that_are_gone_for_good(self) -> None:
        """An engine runs for months: what is remembered of evicted contents has a bound."""
        policy = self.make()

        def come_and_go(number: int) -> None:
            blocks, now_s = [number % 4 * 2, number % 4 * 2 + 1], float(number)
            keys = [f"content {number}.{depth}".encode() for depth in (0, 1)]
            policy.on_use(blocks, keys=keys, depths=[0, 1], salt=f"tenant {number % 3}", now_s=now_s)
            policy.on_free(blocks[::-1], depths=[1, 0], now_s=now_s)
            policy.victims(2)

        growth = growth_bytes(come_and_go)
        assert growth < _MAX_GROWTH_BYTES, (
            f"it grows by {growth:.0f} bytes for each content that was used once and evicted"
        )

    def test_no_thread_is_left(self) -> None:
        """A policy has no ``close``: it starts none."""
        with ends_its_threads("the policy"):
            for _ in _Run(self.make(), 0).operations(40):
                pass

    def _victim_s(self, num_candidates: int) -> float:
        """Return the seconds that one victim takes among so many candidates, each of a sequence of eight blocks."""
        policy = self.make()
        for first in range(0, num_candidates, 8):
            blocks = list(range(first, first + 8))
            keys = [str(block).encode() for block in blocks]
            policy.on_use(blocks, keys=keys, depths=range(8), salt="", now_s=first * 1e-3)
            policy.on_free(blocks[::-1], depths=range(8)[::-1], now_s=first * 1e-3)
        policy.victims(1)

        def evict_and_free() -> None:
            policy.on_free(policy.victims(1), depths=[7], now_s=1e6)

        return call_s(evict_and_free)

    def test_arguments_are_neither_kept_nor_changed(self) -> None:
        """The caller reuses its lists."""
        policy = self.make()
        blocks, depths, keys = [8, 9], [0, 1], [b"8", b"9"]
        policy.on_use(blocks, keys=keys, depths=depths, salt="", now_s=0.0)
        assert (blocks, depths, keys) == ([8, 9], [0, 1], [b"8", b"9"]), "on_use() changed its arguments"
        keys[:] = [b"1", b"2"]
        blocks, depths = [9, 8], [1, 0]
        policy.on_free(blocks, depths=depths, now_s=0.0)
        assert (blocks, depths) == ([9, 8], [1, 0]), "on_free() changed its arguments"
        blocks[:], depths[:] = [1, 2], [7, 6]
        hit = [8]
        policy.on_hit(hit, now_s=0.0)
        assert hit == [8], "on_hit() changed its argument"
        hit[:] = [9]
        victims = policy.victims(1)
        assert victims == [9], f"candidates changed with the caller's lists: {victims}"
        victims.append(8)
        policy.on_free([8], depths=[0], now_s=1.0)
        assert policy.victims(1) == [8]


class _Done:
    """One call of ``victims`` and what was right at that moment."""

    def __init__(self, victims: list[int], num_wanted: int, candidates: set[int]) -> None:
        self.victims = victims
        self.num_wanted = num_wanted
        self.candidates = candidates


class _Run:
    """A random history, and the model: the set of candidates. Every content has its own depth and salt."""

    def __init__(self, policy: EvictionPolicy, seed: int) -> None:
        self.policy = policy
        self.candidates: set[int] = set()
        self._rng = random.Random(seed)
        self._now_s = 0.0

    def operations(self, count: int) -> Iterator[_Done]:
        """Make ``count`` random calls; yields after each call of ``victims``."""
        for _ in range(count):
            self._now_s += self._rng.choice([0.0, 0.0, 0.5])
            choice = self._rng.random()
            if choice < 0.45:
                self._free()
            elif choice < 0.6:
                self._drop(hit=True)
            elif choice < 0.65:
                self._drop(hit=False)
            elif self.candidates:
                yield self._evict()

    def _free(self) -> None:
        others = sorted(set(range(_NUM_BLOCKS)) - self.candidates)
        blocks = self._rng.sample(others, min(len(others), self._rng.randint(1, 6)))
        depths = list(range(len(blocks)))
        if self._rng.random() < 0.7:
            self._use(blocks, depths)
        self.policy.on_free(blocks[::-1], depths=depths[::-1], now_s=self._now_s)
        self.candidates |= set(blocks)

    def _use(self, blocks: list[int], depths: list[int]) -> None:
        content = self._rng.randrange(_NUM_CONTENTS)
        keys = [f"{content}.{depth}".encode() for depth in depths]
        self.policy.on_use(blocks, keys=keys, depths=depths, salt=f"tenant {content % 3}", now_s=self._now_s)

    def _drop(self, *, hit: bool) -> None:
        chosen = self._rng.sample(sorted(self.candidates), min(len(self.candidates), self._rng.randint(0, 4)))
        if hit:
            self.policy.on_hit(chosen, now_s=self._now_s)
        else:
            self.policy.forget(chosen)
        self.candidates -= set(chosen)

    def _evict(self) -> _Done:
        num_wanted = self._rng.randint(1, min(5, len(self.candidates)))
        done = _Done(self.policy.victims(num_wanted), num_wanted, set(self.candidates))
        self.candidates -= set(done.victims)
        return done
