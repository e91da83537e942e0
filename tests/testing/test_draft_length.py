"""The draft length suite passes a small correct draft length and fails every broken one, each for the right reason."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

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


class IgnoresTheLimit(Cautious):
    def choose(self, view):
        return np.full(len(view.slots), 2, np.int32)


class WideLengths(Cautious):
    def choose(self, view):
        return super().choose(view).astype(np.int64)


class NegativeLengths(Cautious):
    def choose(self, view):
        return super().choose(view) - 2


class OneForAll(Cautious):
    def choose(self, view):
        return super().choose(view)[:1]


class WritesIntoTheView(Cautious):
    def choose(self, view):
        chosen = super().choose(view)
        view.max_draft_tokens[:] = chosen
        return chosen


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


class NeverForgets(ForgetsTheEpoch):
    def on_finished(self, *, slot):
        pass


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


class Slow(Cautious):
    """Linear, and a little slow: that is what a benchmark is for; the suite lets it pass."""

    def choose(self, view):
        end = time.perf_counter() + len(view.slots) * 1e-6
        while time.perf_counter() < end:
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


class KnowsFourSlots(Cautious):
    """A sequence that waits has a slot, too."""

    def wanted(self, slot, epoch):
        return [1, 1, 1, 1][slot]


class RemembersEpochs(Cautious):
    def __init__(self):
        super().__init__()
        self.epochs = {}

    def choose(self, view):
        self.epochs.update(zip(view.epochs.tolist(), view.slots.tolist(), strict=True))
        return super().choose(view)


class LearnsOnAThread(Cautious):
    def __init__(self):
        super().__init__()
        threading.Thread(target=threading.Event().wait, name="learner", daemon=True).start()


MUTANTS = {
    RemembersEpochs: "test_nothing_is_kept_of_sequences_that_ended",
    LearnsOnAThread: "test_no_thread_is_left",
    IgnoresTheLimit: "test_lengths_are_whole_numbers_from_0_to_the_limits",
    WideLengths: "test_lengths_are_whole_numbers_from_0_to_the_limits",
    NegativeLengths: "test_lengths_are_whole_numbers_from_0_to_the_limits",
    OneForAll: "test_lengths_are_whole_numbers_from_0_to_the_limits",
    WritesIntoTheView: "test_the_view_is_not_changed",
    WritesIntoTheVerdict: "test_the_view_is_not_changed",
    EveryOtherOneIsDifferent: "test_same_calls_give_the_same_lengths",
    ForgetsTheEpoch: "test_a_slot_forgets_the_sequence_that_held_it",
    NeverForgets: "test_a_slot_forgets_the_sequence_that_held_it",
    NeedsToKnowTheSlot: "test_verdicts_and_ends_may_concern_anybody",
    DividesByTime: "test_verdicts_and_ends_may_concern_anybody",
    WaitsForADisk: "test_a_choice_takes_microseconds",
    AsksEverybodyAboutEverybody: "test_cost_grows_no_faster_than_the_number_of_sequences",
    KnowsFourSlots: "test_text_is_that_of_no_speculation",
    ThinksEpochsAreSmall: "test_preempted_sequences_go_on_as_if_nothing_had_happened",
    CountsSequences: "test_aborts_at_any_step_leave_nothing_behind",
}


@pytest.mark.parametrize(("mutant", "test"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_suite_fails_a_broken_draft_length(failures_of, mutant, test):
    assert failures_of(DraftLengthConformance, mutant, only=test)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("correct", [Cautious, Slow])
def test_suite_passes_what_is_correct(failures_of, correct):
    assert failures_of(DraftLengthConformance, correct) == set()


def test_every_test_of_the_suite_is_needed_by_a_mutant():
    assert set(MUTANTS.values()) == {name for name in dir(DraftLengthConformance) if name.startswith("test_")}


def test_suite_without_make_says_what_to_do():
    with pytest.raises(NotImplementedError, match="make = YourDraftLength"):
        DraftLengthConformance().make()


def test_a_view_has_the_limits_slots_and_epochs_asked_for():
    view = length_view([3, 1], slots=[4, 2], epochs=[7, 8], num_running=5)
    assert (view.max_draft_tokens.tolist(), view.slots.tolist(), view.epochs.tolist()) == ([3, 1], [4, 2], [7, 8])
    assert (view.num_running, view.padded_tokens(5, 3), length_view([1], pads=True).padded_tokens(5, 3)) == (5, 15, 32)


@pytest.mark.parametrize(("pads", "positions"), [(False, 2 + 4), (True, 2 * 4)])
def test_a_verdict_counts_the_positions_of_its_layout(pads, positions):
    step = verified_step(length_view([3, 3], pads=pads), [3, 1], [0, 1], num_prefill_tokens=10)
    assert (step.num_tokens, step.num_prefill_tokens) == (positions + 10, 10)
