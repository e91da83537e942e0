"""The eviction suite passes a small correct policy and fails every broken one, each for the right reason."""

from __future__ import annotations

import itertools
import threading

import pytest

from trencadis.interfaces import EvictionPolicy
from trencadis_testing.eviction import EvictionConformance

NEVER_SET = threading.Event()


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


class KeepsHitBlocks(Newest):
    def on_hit(self, blocks, *, now_s):
        pass


class KeepsForgottenBlocks(Newest):
    def forget(self, blocks):
        pass


class LooksWithoutTaking(Newest):
    def victims(self, num_blocks):
        return self.blocks[:num_blocks]


class OneTooFew(Newest):
    def victims(self, num_blocks):
        return super().victims(num_blocks)[: max(1, num_blocks - 1)]


class SameBlockTwice(Newest):
    def victims(self, num_blocks):
        return [self.blocks.pop()] * num_blocks


class LosesDeepBlocks(Newest):
    def on_free(self, blocks, *, depths, now_s):
        super().on_free([block for block, depth in zip(blocks, depths, strict=True) if depth < 4], depths=[], now_s=0.0)

    def victims(self, num_blocks):
        return [self.blocks.pop() for _ in range(min(num_blocks, len(self.blocks)))]


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


class FailsOnNothing(Newest):
    def on_free(self, blocks, *, depths, now_s):
        super().on_free([blocks[0], *blocks[1:]], depths=depths, now_s=now_s)


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


class PicksInOrderOfASet(PicksByHash):
    def on_use(self, blocks, *, keys, depths, salt, now_s):
        self.keys.update(dict.fromkeys(blocks, salt))

    def victims(self, num_blocks):
        order = list(set(self.keys.values()))
        self.blocks.sort(key=lambda block: order.index(self.keys[block]) if block in self.keys else -1)
        return Newest.victims(self, num_blocks)


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


class WatchesOnAThread(Newest):
    def __init__(self):
        super().__init__()
        threading.Thread(target=NEVER_SET.wait, name="watch", daemon=True).start()


MUTANTS = {
    LooksAtAllCandidates: "test_a_victim_costs_no_more_among_many_candidates",
    RemembersEveryContent: "test_nothing_is_kept_of_contents_that_are_gone_for_good",
    WatchesOnAThread: "test_no_thread_is_left",
    KeepsHitBlocks: "test_hit_blocks_are_no_candidates_until_they_are_freed_again",
    KeepsForgottenBlocks: "test_forgotten_blocks_are_no_candidates",
    LooksWithoutTaking: "test_victims_are_as_many_candidates_as_asked_for_and_each_once",
    OneTooFew: "test_victims_are_as_many_candidates_as_asked_for_and_each_once",
    SameBlockTwice: "test_victims_are_as_many_candidates_as_asked_for_and_each_once",
    LosesDeepBlocks: "test_every_candidate_is_evicted_in_the_end",
    OnlyOneLife: "test_evicted_blocks_may_become_candidates_again",
    LosesTies: "test_blocks_of_equal_depth_and_time_are_all_candidates",
    EveryOtherOneIsDifferent: "test_same_calls_give_the_same_victims",
    PicksByHash: "test_same_victims_in_a_process_that_hashes_differently",
    PicksInOrderOfASet: "test_same_victims_in_a_process_that_hashes_differently",
    FailsOnNothing: "test_empty_calls_are_harmless",
    KeepsTheCallersList: "test_arguments_are_neither_kept_nor_changed",
    TakesUsesForFrees: "test_uses_make_no_candidates",
    LosesWhatComesBack: "test_contents_come_back_after_eviction_in_any_block",
    TrustsTheFirstContent: "test_a_used_block_may_turn_to_other_content_unseen",
    SortsTheCallersKeys: "test_arguments_are_neither_kept_nor_changed",
    SortsTheCallersList: "test_arguments_are_neither_kept_nor_changed",
}


@pytest.mark.parametrize(("mutant", "test"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_suite_fails_a_broken_policy(failures_of, mutant, test):
    assert failures_of(EvictionConformance, mutant, only=test)


def test_suite_passes_the_policy_that_the_mutants_break(failures_of):
    assert failures_of(EvictionConformance, Newest) == set()


def test_every_test_of_the_suite_is_needed_by_a_mutant():
    assert set(MUTANTS.values()) == {name for name in dir(EvictionConformance) if name.startswith("test_")}


def test_suite_without_make_says_what_to_do():
    with pytest.raises(NotImplementedError, match="make = YourPolicy"):
        EvictionConformance().make()
