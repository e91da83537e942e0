"""Records of the scheduler's plan for one step."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from trencadis.records.arrays import BoolArray, Int32Array, Int64Array

__all__ = ["DraftDistributions", "Drafts", "Plan"]


def _none() -> Int32Array:
    return np.empty(0, np.int32)


@attrs.frozen(kw_only=True, eq=False)
class DraftDistributions:
    """Distributions that drafts were drawn from. Drafts without one are deterministic.

    Attributes:
        rows: Row of ``probabilities`` for each draft, -1 for none, int32 ``[sum(num_drafts)]``. Drafts after one token were
            drawn one after another, without replacement, and have one row.
        probabilities: ``[num_rows, vocab_size]``, a tensor on the device; each row sums to 1.
    """

    rows: Int32Array
    probabilities: Any


@attrs.frozen(kw_only=True)
class Drafts:
    """Draft tokens for the sequences of a plan; linear when ``parents`` is None.

    Attributes:
        num_drafts: Drafts per sequence, int32 ``[num_sequences]``.
        token_ids: All drafts, sequence after sequence, int32 ``[sum(num_drafts)]``.
        parents: For tree drafts the index of each draft's parent within its sequence, -1 for the root,
            int32 ``[sum(num_drafts)]``; parents come before children.
        distributions: Distributions that they were drawn from; None: all are deterministic.
    """

    num_drafts: Int32Array
    token_ids: Int32Array
    parents: Int32Array | None = None
    distributions: DraftDistributions | None = None

    def take(self, indices: Int32Array, counts: Int32Array) -> Drafts:
        """Return the first ``counts`` drafts of some sequences, in that order. Pure.

        The first drafts of a tree are a tree, for parents come before children.

        Args:
            indices: Which sequences, int32 ``[n]``; -1 for one without drafts.
            counts: How many of each, int32 ``[n]``; 0 where the index is -1.
        """
        if counts.tobytes() == self.num_drafts.tobytes() and (indices == np.arange(len(indices))).all():
            return self
        firsts = np.cumsum(self.num_drafts) - self.num_drafts
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        picks = np.repeat(firsts[indices], counts) + within if len(firsts) else within
        distributions = self.distributions
        if distributions is not None:
            distributions = DraftDistributions(
                rows=distributions.rows[picks], probabilities=distributions.probabilities
            )
        return Drafts(
            num_drafts=counts,
            token_ids=self.token_ids[picks].astype(np.int32),
            parents=None if self.parents is None else self.parents[picks],
            distributions=distributions,
        )

    def copy(self) -> Drafts:
        """Return the same drafts, with counts and tokens of their own. Pure."""
        return attrs.evolve(self, num_drafts=self.num_drafts.copy(), token_ids=self.token_ids.copy())


def _total(plan: Plan) -> int:
    return int(plan.num_scheduled.sum())


# A dict for its fields: one is made for each step, and slots of frozen classes take twice as long to set.
@attrs.frozen(kw_only=True, slots=False)
class Plan:
    """Who runs how many tokens in one step: ``sequence → num_tokens``, as parallel arrays.

    Prefill and decode are words for many tokens and one token; the plan does not tell them apart.

    Attributes:
        step: Number of the step, from 0.
        slots: Slot of each sequence in the engine's table, int32 ``[num_sequences]``.
        rows: Row of each sequence in the device's state, int32 ``[num_sequences]``, 0 .. max_num_seqs - 1.
        epochs: Residency counter of each slot when the plan was made, int64 ``[num_sequences]``; a result is
            applied only while it is unchanged.
        starts: Computed tokens of each sequence before the step, int32 ``[num_sequences]``.
        num_scheduled: Tokens to compute, drafts included, int32 ``[num_sequences]``, each at least 1.
        samples: True where the last scheduled token is the last known one, so that the step yields a token;
            bool ``[num_sequences]``.
        drafts: Draft tokens to verify, or None.
        admitted: Slots that enter the device with this step, int32; a subset of ``slots``.
        preempted: Slots that lost their blocks in this plan, int32; disjoint from ``slots``.
        num_tokens: Tokens to compute in the step, all sequences together: the sum of ``num_scheduled``, which is taken if it is not given.
    """

    step: int
    slots: Int32Array
    rows: Int32Array
    epochs: Int64Array
    starts: Int32Array
    num_scheduled: Int32Array
    samples: BoolArray
    drafts: Drafts | None = None
    admitted: Int32Array = attrs.field(factory=_none)
    preempted: Int32Array = attrs.field(factory=_none)
    num_tokens: int = attrs.field(default=attrs.Factory(_total, takes_self=True))

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return len(self.slots)

    @property
    def num_to_verify(self) -> Int32Array:
        """Tokens of each sequence that the step verifies, the last ones of ``num_scheduled``, int32 ``[num_sequences]``."""
        return np.zeros(len(self.slots), np.int32) if self.drafts is None else self.drafts.num_drafts
