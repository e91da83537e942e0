"""The speculation suite passes a small correct speculator and fails every broken one, each for the right reason."""

from __future__ import annotations

import itertools

import numpy as np

from support.mutants import broken, leaves_a_thread, proofs
from trencadis.interfaces import Speculator
from trencadis.records import DraftDistributions, Drafts
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.speculation import SpeculationConformance, draft_view


class LastPair(Speculator):
    """Correct: drafts what followed the last token when it last occurred. Each mutant breaks one thing."""

    max_draft_tokens = 3

    def propose(self, view):
        runs = [
            self.draft(slot, epoch, tokens.tolist())[:most]
            for slot, epoch, tokens, most in zip(
                view.slots.tolist(),
                view.epochs.tolist(),
                view.token_ids,
                view.max_draft_tokens.tolist(),
                strict=True,
            )
        ]
        return self.drafts(runs)

    def drafts(self, runs):
        return Drafts(
            num_drafts=np.array([len(run) for run in runs], np.int32),
            token_ids=np.array([token for run in runs for token in run], np.int32),
            **self.more(runs),
        )

    def more(self, runs):
        return {}

    def draft(self, slot, epoch, tokens):
        for i in range(len(tokens) - 2, -1, -1):
            if tokens[i] == tokens[-1]:
                return tokens[i + 1 : i + 1 + self.max_draft_tokens]
        return []


class TestLastPair(SpeculationConformance):
    make = LastPair


class TestScripted(SpeculationConformance):
    """Drafts that are almost always wrong cost nothing but time."""

    def make(self):
        return ScriptedSpeculator(lambda tokens: [int(tokens[-1])] * 3)


LimitIsZero = type("LimitIsZero", (LastPair,), {"max_draft_tokens": 0})
LimitIsAFraction = type("LimitIsAFraction", (LastPair,), {"max_draft_tokens": 3.0})
KeepsLessThanNothing = type("KeepsLessThanNothing", (LastPair,), {"kv_bytes_per_token": -1})


class ClosesOnce(LastPair):
    def close(self):
        if hasattr(self, "is_closed"):
            raise RuntimeError("closed already")
        self.is_closed = True


class LimitGrows(LastPair):
    def __init__(self):
        self.max_draft_tokens = 3

    def propose(self, view):
        self.max_draft_tokens += 1
        return super().propose(view)


class InOrderOfSlots(LastPair):
    def propose(self, view):
        order = np.argsort(view.slots)
        histories = [view.token_ids[i].tolist() for i in order]
        return super().propose(draft_view(histories, most=view.max_draft_tokens[order].tolist()))


class WritesIntoTheView(LastPair):
    def propose(self, view):
        drafts = super().propose(view)
        for tokens in view.token_ids:
            tokens[:-1] = tokens[-1]
        return drafts


class EveryOtherOneIsDifferent(LastPair):
    made = itertools.count()

    def __init__(self):
        self.most = 1 + next(self.made) % 2

    def draft(self, slot, epoch, tokens):
        return super().draft(slot, epoch, tokens)[: self.most]


class GoesByHash(LastPair):
    def propose(self, view):
        self.cuts = [hash(request.tenant) % 3 for request in view.requests]
        return super().propose(view)

    def drafts(self, runs):
        return super().drafts([run[:cut] for run, cut in zip(runs, self.cuts, strict=True)])


class RemembersSlots(LastPair):
    """Keeps the first history of a slot until it is told, and forgets the epoch."""

    def __init__(self):
        self.known = {}

    def draft(self, slot, epoch, tokens):
        known = self.known.setdefault(slot, [])
        known += tokens[len(known) :]
        return super().draft(slot, epoch, known)

    def on_finished(self, *, slot, token_ids):
        self.known.pop(slot, None)


class NeedsToKnowTheSlot(LastPair):
    def __init__(self):
        self.seen = set()

    def draft(self, slot, epoch, tokens):
        self.seen.add(slot)
        return super().draft(slot, epoch, tokens)

    def on_finished(self, *, slot, token_ids):
        self.seen.remove(slot)


class DividesByDrafts(LastPair):
    def on_verified(self, *, slots, num_drafts, num_accepted):
        self.rates = [accepted // drafted for accepted, drafted in zip(num_accepted, num_drafts.tolist(), strict=True)]


class Forest(LastPair):
    """Correct: every draft is behind the newest token, where drafts may branch."""

    drafts_trees = True

    def propose(self, view):
        self.linear_only = view.linear_only.tolist()
        return super().propose(view)

    def drafts(self, runs):
        cut = [run if line else sorted(set(run)) for run, line in zip(runs, self.linear_only, strict=True)]
        return super().drafts(cut)

    def more(self, runs):
        parents = [
            j - 1 if line else -1 for run, line in zip(runs, self.linear_only, strict=True) for j in range(len(run))
        ]
        return {"parents": np.array(parents, np.int32)}


class BranchesWhereItMayNot(Forest):
    def propose(self, view):
        self.linear_only = [False] * len(view.slots)
        return LastPair.propose(self, view)


class Drawn(LastPair):
    """Correct: says that each draft was drawn from among all tokens alike."""

    distribution = np.full((1, 97), 1 / 97)

    def more(self, runs):
        return {
            "distributions": DraftDistributions(rows=self.rows(sum(map(len, runs))), probabilities=self.distribution)
        }

    def rows(self, num_drafts):
        return np.zeros(num_drafts, np.int32)


class ExpectsEveryStep(LastPair):
    """A sequence that it has not seen for a while has more new tokens than it drafted."""

    def __init__(self):
        self.lengths = {}

    def draft(self, slot, epoch, tokens):
        if len(tokens) > self.lengths.setdefault(slot, len(tokens)) + self.max_draft_tokens + 1 and epoch == 1:
            raise IndexError(len(tokens))
        self.lengths[slot] = len(tokens)
        return super().draft(slot, epoch, tokens)


class LearnsFromTheTenant(LastPair):
    """Remembers what a tenant's requests were, whatever their cache salt."""

    def __init__(self):
        self.past = {}

    def propose(self, view):
        runs = []
        for request, tokens, most in zip(view.requests, view.token_ids, view.max_draft_tokens.tolist(), strict=True):
            past = self.past.setdefault(request.tenant, [])
            runs.append(LastPair.draft(self, 0, 0, [*past, *tokens.tolist()])[:most])
            past += tokens.tolist()
        return self.drafts(runs)


class RunsOutOfRoom(LastPair):
    """Takes a place for each sequence that ends, as if slots were never used again."""

    num_ended = 0

    def on_finished(self, *, slot, token_ids):
        self.num_ended += 1
        if self.num_ended > 12:
            raise IndexError("no place left")


class WritesIntoLongTexts(LastPair):
    def propose(self, view):
        drafts = super().propose(view)
        for tokens in view.token_ids:
            if len(tokens) > 30:
                tokens[-1] = 1
        return drafts


class FailsOnManyAccepted(LastPair):
    """Only text that repeats itself has three right drafts in a row."""

    def on_verified(self, *, slots, num_drafts, num_accepted):
        self.tired = getattr(self, "tired", False) or bool((num_accepted >= 3).any())

    def propose(self, view):
        if getattr(self, "tired", False):
            raise IndexError("too many")
        return super().propose(view)


class FailsOnHighEpochs(LastPair):
    """A preemption is a new epoch of the same slot in the middle of a text."""

    def __init__(self):
        self.lengths = {}

    def draft(self, slot, epoch, tokens):
        first, length = self.lengths.get(slot, (epoch, 0))
        if epoch != first and len(tokens) > 20:
            raise KeyError(epoch)
        self.lengths[slot] = (first, length)
        return super().draft(slot, epoch, tokens)

    def on_finished(self, *, slot, token_ids):
        self.lengths.pop(slot, None)


class TestForest(SpeculationConformance):
    make = Forest


class TestDrawn(SpeculationConformance):
    make = Drawn


MUTANTS = {
    "test_no_thread_outlives_close": [leaves_a_thread(LastPair)],
    "test_number_of_drafts_is_positive_and_constant": [LimitIsZero, LimitIsAFraction, LimitGrows],
    "test_bytes_it_keeps_for_each_token_are_a_whole_number": [KeepsLessThanNothing],
    "test_close_may_come_twice_and_without_a_call": [ClosesOnce],
    "test_drafts_are_no_more_than_allowed_and_in_one_flat_array": [
        broken(
            "IgnoresTheLimit",
            LastPair,
            propose=lambda self, view: LastPair.propose(
                self, draft_view([t.tolist() for t in view.token_ids], most=3, slots=view.slots.tolist())
            ),
        )
    ],
    "test_drafts_are_int32_token_ids_of_the_vocabulary": [
        broken("BeyondTheVocabulary", LastPair, draft=lambda self, slot, epoch, tokens: [tokens[-1] + 1])
    ],
    "test_drafts_come_in_the_order_of_the_view": [InOrderOfSlots],
    "test_the_view_is_not_changed": [WritesIntoTheView],
    "test_same_calls_give_the_same_drafts": [EveryOtherOneIsDifferent],
    "test_same_drafts_in_a_process_that_hashes_differently": [GoesByHash],
    "test_a_slot_forgets_the_sequence_that_held_it": [RemembersSlots],
    "test_verdicts_and_ends_may_concern_sequences_without_drafts": [NeedsToKnowTheSlot, DividesByDrafts],
    "test_drafts_branch_only_where_they_may_and_parents_come_first": [
        BranchesWhereItMayNot,
        broken(
            "SameTwice", Forest, drafts=lambda self, runs: LastPair.drafts(self, [[run[0]] * len(run) for run in runs])
        ),
    ],
    "test_distributions_say_how_each_draft_was_drawn": [
        broken("RowsOfNoDistribution", Drawn, rows=lambda self, num_drafts: np.ones(num_drafts, np.int32))
    ],
    "test_sequences_left_out_of_calls_come_back": [ExpectsEveryStep],
    "test_nobody_is_drafted_another_tenant_s_text": [LearnsFromTheTenant],
    "test_text_is_that_of_no_speculation": [WritesIntoLongTexts],
    "test_text_that_repeats_itself_is_that_of_no_speculation": [FailsOnManyAccepted],
    "test_preempted_sequences_go_on_as_if_nothing_had_happened": [FailsOnHighEpochs],
    "test_aborts_at_any_step_leave_nothing_behind": [RunsOutOfRoom],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(SpeculationConformance, MUTANTS)
