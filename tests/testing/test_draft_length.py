"""The draft length suite passes a small correct draft length and fails every broken one, each for the right reason."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from support.mutants import broken, leaves_a_thread, proofs
from trencadis.interfaces import DraftLength
from trencadis_testing.draft_length import DraftLengthConformance, length_view, verified_step


class Cautious(DraftLength):
    """Correct: one draft, two for a sequence whose last drafts stood. Each mutant breaks one thing."""

    def __init__(self):
        self.lucky = {}

    def choose(self, view):
        wanted = [
            self.wanted(slot, epoch) for slot, epoch in zip(view.slots.tolist(), view.epochs.tolist(), strict=True)
        ]
        return np.minimum(wanted, view.max_draft_tokens).astype(np.int32)

    def wanted(self, slot, epoch):
        return 2 if self.lucky.get(slot) == epoch else 1

    def on_verified(self, step):
        for slot, epoch, drafts, accepted in zip(
            step.slots.tolist(), step.epochs.tolist(), step.num_drafts, step.num_accepted, strict=True
        ):
            if accepted and accepted == drafts:
                self.lucky[slot] = epoch
            else:
                self.lucky.pop(slot, None)

    def on_finished(self, *, slot):
        self.lucky.pop(slot, None)


class TestCautious(DraftLengthConformance):
    make = Cautious


class WritesIntoTheVerdict(Cautious):
    def on_verified(self, step):
        super().on_verified(step)
        step.num_accepted[:] += 1


class EveryOtherOneIsDifferent(Cautious):
    made = itertools.count()

    def __init__(self):
        super().__init__()
        self.extra = next(self.made) % 2

    def wanted(self, slot, epoch):
        return super().wanted(slot, epoch) + self.extra


class ForgetsTheEpoch(Cautious):
    def wanted(self, slot, epoch):
        return 2 if slot in self.lucky else 1


class NeedsToKnowTheSlot(Cautious):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def wanted(self, slot, epoch):
        self.seen.add(slot)
        return super().wanted(slot, epoch)

    def on_finished(self, *, slot):
        self.seen.remove(slot)


class DividesByTime(Cautious):
    def on_verified(self, step):
        super().on_verified(step)
        self.speed = step.num_tokens / step.step_s


class AsksEverybodyAboutEverybody(Cautious):
    def choose(self, view):
        for _ in itertools.product(view.slots.tolist(), repeat=2):
            pass
        return super().choose(view)


class WaitsForADisk(Cautious):
    def choose(self, view):
        time.sleep(0.005)
        return super().choose(view)


class CountsSequences(Cautious):
    """Takes a place for each sequence that ends, as if slots were never used again."""

    num_ended = 0

    def on_finished(self, *, slot):
        self.num_ended += 1
        if self.num_ended > 14:
            raise IndexError("no place left")


class ThinksEpochsAreSmall(Cautious):
    """A preemption is a new epoch of the same slot in the middle of a text."""

    def __init__(self):
        super().__init__()
        self.first = {}

    def wanted(self, slot, epoch):
        if self.first.setdefault(slot, epoch) != epoch:
            raise KeyError(epoch)
        return 1

    def on_finished(self, *, slot):
        self.first.pop(slot, None)


class RemembersEpochs(Cautious):
    def __init__(self):
        super().__init__()
        self.epochs = {}

    def choose(self, view):
        self.epochs.update(zip(view.epochs.tolist(), view.slots.tolist(), strict=True))
        return super().choose(view)


class Slow(Cautious):
    """Linear, and a little slow: that is what a benchmark is for; the suite lets it pass."""

    def choose(self, view):
        end = time.perf_counter() + len(view.slots) * 1e-6
        while time.perf_counter() < end:
            pass
        return super().choose(view)


class TestSlow(DraftLengthConformance):
    make = Slow


MUTANTS = {
    "test_nothing_is_kept_of_sequences_that_ended": [RemembersEpochs],
    "test_no_thread_is_left": [leaves_a_thread(Cautious)],
    "test_lengths_are_whole_numbers_from_0_to_the_limits": [
        broken("IgnoresTheLimit", Cautious, choose=lambda self, view: np.full(len(view.slots), 2, np.int32)),
        broken("WideLengths", Cautious, choose=lambda self, view: Cautious.choose(self, view).astype(np.int64)),
    ],
    "test_the_view_is_not_changed": [WritesIntoTheVerdict],
    "test_same_calls_give_the_same_lengths": [EveryOtherOneIsDifferent],
    "test_a_slot_forgets_the_sequence_that_held_it": [ForgetsTheEpoch],
    "test_verdicts_and_ends_may_concern_anybody": [NeedsToKnowTheSlot, DividesByTime],
    "test_a_choice_takes_microseconds": [WaitsForADisk],
    "test_cost_grows_no_faster_than_the_number_of_sequences": [AsksEverybodyAboutEverybody],
    "test_text_is_that_of_no_speculation": [
        broken("KnowsFourSlots", Cautious, wanted=lambda self, slot, epoch: [1, 1, 1, 1][slot])
    ],
    "test_preempted_sequences_go_on_as_if_nothing_had_happened": [ThinksEpochsAreSmall],
    "test_aborts_at_any_step_leave_nothing_behind": [CountsSequences],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(DraftLengthConformance, MUTANTS)


@pytest.mark.parametrize(("pads", "positions"), [(False, 2 + 4), (True, 2 * 4)])
def test_a_verdict_counts_the_positions_of_its_layout(pads, positions):
    step = verified_step(length_view([3, 3], pads=pads), [3, 1], [0, 1], num_prefill_tokens=10)
    assert (step.num_tokens, step.num_prefill_tokens) == (positions + 10, 10)
