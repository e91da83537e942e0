"""What the scheduler decided for one step."""

from __future__ import annotations

import attrs
import numpy as np

from trencadis.records.arrays import BoolArray, Int32Array, Int64Array

__all__ = ["Drafts", "Plan"]


def _none() -> Int32Array:
    return np.empty(0, np.int32)


@attrs.frozen(kw_only=True)
class Drafts:
    """Draft tokens for the sequences of a plan; linear when ``parents`` is None.

    Attributes:
        num_drafts: Drafts per sequence, int32 ``[num_sequences]``.
        token_ids: All drafts, sequence after sequence, int32 ``[sum(num_drafts)]``.
        parents: For tree drafts the index of each draft's parent within its sequence, -1 for the root,
            int32 ``[sum(num_drafts)]``; parents come before children.
    """

    num_drafts: Int32Array
    token_ids: Int32Array
    parents: Int32Array | None = None


@attrs.frozen(kw_only=True)
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
        connector_message: What the KV connector's worker side is to do in this step; empty without one.
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
    connector_message: bytes = b""

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in the step, all sequences together."""
        return int(self.num_scheduled.sum())
