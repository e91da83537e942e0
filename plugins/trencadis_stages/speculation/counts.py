"""What a step with drafts adds to the statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from trencadis.records import Drafts, Int32Array, Int64Array

__all__ = ["draft_stats"]


def draft_stats(drafts: Drafts, num_accepted: Int32Array) -> dict[str, Any]:
    """Return the fields of ``StepStats`` that count a step's drafts. Pure.

    The position of a draft is the number of drafts before it on its way to the known tokens.

    Args:
        drafts: Drafts of the plan.
        num_accepted: Emitted drafts of each sequence of the plan: the first ones of a chain, or a way down a tree.
    """
    drafted = np.bincount(_positions(drafts))
    accepted = (num_accepted[:, None] > np.arange(len(drafted))).sum(0)
    return {
        "num_drafted_sequences": int((drafts.num_drafts > 0).sum()),
        "num_draft_tokens": int(drafted.sum()),
        "num_accepted_tokens": int(accepted.sum()),
        "num_drafted_by_position": tuple(drafted.tolist()),
        "num_accepted_by_position": tuple(accepted.tolist()),
    }


def _positions(drafts: Drafts) -> Int64Array:
    firsts = np.repeat(np.cumsum(drafts.num_drafts) - drafts.num_drafts, drafts.num_drafts)
    if drafts.parents is None:
        return np.arange(len(firsts)) - firsts
    parents = np.where(drafts.parents >= 0, drafts.parents + firsts, -1)
    positions, ancestors = np.zeros(len(firsts), np.int64), parents
    while (ancestors >= 0).any():
        positions += ancestors >= 0
        ancestors = np.where(ancestors >= 0, parents[ancestors], -1)
    return positions
