"""The eviction suite passes a small correct policy and fails every broken one, each for the right reason."""

from __future__ import annotations

import itertools

from support.mutants import broken, leaves_a_thread, proofs
from trencadis.interfaces import EvictionPolicy
from trencadis_testing.eviction import EvictionConformance


class Newest(EvictionPolicy):
    """Correct: last freed, first evicted. Each mutant breaks one thing."""

    def __init__(self):
        self.blocks = []

    def on_free(self, blocks, *, depths, now_s):
        self.blocks.extend(blocks)

    def on_hit(self, blocks, *, now_s):
        self.blocks = [block for block in self.blocks if block not in set(blocks)]

    def victims(self, num_blocks):
        return [self.blocks.pop() for _ in range(num_blocks)]

    def forget(self, blocks):
        self.on_hit(blocks, now_s=0.0)


class TestNewest(EvictionConformance):
    make = Newest


class OnlyOneLife(Newest):
    def __init__(self):
        super().__init__()
        self.evicted = set()

    def victims(self, num_blocks):
        chosen = [block for block in self.blocks if block not in self.evicted][:num_blocks]
        self.evicted.update(chosen)
        return chosen


class LosesTies(Newest):
    """Keeps one block for each depth and time."""

    def __init__(self):
        super().__init__()
        self.by_key = {}

    def on_free(self, blocks, *, depths, now_s):
        for block, depth in zip(blocks, depths, strict=True):
            self.by_key[now_s, depth] = block
        self.blocks = list(self.by_key.values())


class EveryOtherOneIsDifferent(Newest):
    made = itertools.count()

    def __init__(self):
        super().__init__()
        self.end = -1 if next(self.made) % 2 else 0

    def victims(self, num_blocks):
        return [self.blocks.pop(self.end) for _ in range(num_blocks)]


class KeepsTheCallersList(Newest):
    def on_free(self, blocks, *, depths, now_s):
        if self.blocks:
            super().on_free(blocks, depths=depths, now_s=now_s)
        else:
            self.blocks = blocks


class SortsTheCallersList(Newest):
    def on_free(self, blocks, *, depths, now_s):
        blocks.sort()
        super().on_free(blocks, depths=depths, now_s=now_s)


class TakesUsesForFrees(Newest):
    def on_use(self, blocks, *, keys, depths, salt, now_s):
        self.on_hit(blocks, now_s=now_s)
        self.blocks.extend(blocks)


class LosesWhatComesBack(Newest):
    """Remembers contents, and takes one that comes back for still cached."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_use(self, blocks, *, keys, depths, salt, now_s):
        for block, key in zip(blocks, keys, strict=True):
            self.seen.setdefault(key, block)

    def on_free(self, blocks, *, depths, now_s):
        known = set(self.seen.values())
        super().on_free([block for block in blocks if block in known or not known], depths=depths, now_s=now_s)


class TrustsTheFirstContent(Newest):
    def __init__(self):
        super().__init__()
        self.key_of = {}

    def on_use(self, blocks, *, keys, depths, salt, now_s):
        for block, key in zip(blocks, keys, strict=True):
            if block in self.key_of:
                raise KeyError(f"{block} holds {self.key_of[block]!r}, not {key!r}")
            self.key_of[block] = key

    def on_hit(self, blocks, *, now_s):
        super().on_hit(blocks, now_s=now_s)
        for block in blocks:
            self.key_of.pop(block, None)

    def victims(self, num_blocks):
        chosen = super().victims(num_blocks)
        for block in chosen:
            self.key_of.pop(block, None)
        return chosen


class SortsTheCallersKeys(Newest):
    def on_use(self, blocks, *, keys, depths, salt, now_s):
        if keys:
            keys.sort(reverse=True)


class PicksByHash(Newest):
    def __init__(self):
        super().__init__()
        self.keys = {}

    def on_use(self, blocks, *, keys, depths, salt, now_s):
        self.keys.update(zip(blocks, keys, strict=True))

    def victims(self, num_blocks):
        self.blocks.sort(key=lambda block: hash(self.keys.get(block, b"")))
        return super().victims(num_blocks)


class LooksAtAllCandidates(Newest):
    def victims(self, num_blocks):
        chosen = sorted(self.blocks, key=lambda block: -block)[:num_blocks]
        self.blocks = [block for block in self.blocks if block not in chosen]
        return chosen


class RemembersEveryContent(Newest):
    def __init__(self):
        super().__init__()
        self.num_uses = {}

    def on_use(self, blocks, *, keys, depths, salt, now_s):
        for key in keys:
            self.num_uses[key] = self.num_uses.get(key, 0) + 1


MUTANTS = {
    "test_a_victim_costs_no_more_among_many_candidates": [LooksAtAllCandidates],
    "test_nothing_is_kept_of_contents_that_are_gone_for_good": [RemembersEveryContent],
    "test_no_thread_is_left": [leaves_a_thread(Newest)],
    "test_hit_blocks_are_no_candidates_until_they_are_freed_again": [
        broken("KeepsHitBlocks", Newest, on_hit=lambda self, blocks, *, now_s: None)
    ],
    "test_forgotten_blocks_are_no_candidates": [
        broken("KeepsForgottenBlocks", Newest, forget=lambda self, blocks: None)
    ],
    "test_victims_are_as_many_candidates_as_asked_for_and_each_once": [
        broken("LooksWithoutTaking", Newest, victims=lambda self, num_blocks: self.blocks[:num_blocks]),
        broken("SameBlockTwice", Newest, victims=lambda self, num_blocks: [self.blocks.pop()] * num_blocks),
    ],
    "test_every_candidate_is_evicted_in_the_end": [
        broken(
            "LosesDeepBlocks",
            Newest,
            on_free=lambda self, blocks, *, depths, now_s: Newest.on_free(
                self, [block for block, depth in zip(blocks, depths, strict=True) if depth < 4], depths=[], now_s=0.0
            ),
            victims=lambda self, num_blocks: [self.blocks.pop() for _ in range(min(num_blocks, len(self.blocks)))],
        )
    ],
    "test_evicted_blocks_may_become_candidates_again": [OnlyOneLife],
    "test_blocks_of_equal_depth_and_time_are_all_candidates": [LosesTies],
    "test_same_calls_give_the_same_victims": [EveryOtherOneIsDifferent],
    "test_same_victims_in_a_process_that_hashes_differently": [PicksByHash],
    "test_empty_calls_are_harmless": [
        broken(
            "FailsOnNothing",
            Newest,
            on_free=lambda self, blocks, *, depths, now_s: Newest.on_free(
                self, [blocks[0], *blocks[1:]], depths=depths, now_s=now_s
            ),
        )
    ],
    "test_arguments_are_neither_kept_nor_changed": [KeepsTheCallersList, SortsTheCallersKeys, SortsTheCallersList],
    "test_uses_make_no_candidates": [TakesUsesForFrees],
    "test_contents_come_back_after_eviction_in_any_block": [LosesWhatComesBack],
    "test_a_used_block_may_turn_to_other_content_unseen": [TrustsTheFirstContent],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(EvictionConformance, MUTANTS)
