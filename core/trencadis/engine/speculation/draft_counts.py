"""How many drafts there were at each position of a step, and how many of them were emitted."""

from __future__ import annotations

from itertools import zip_longest

import attrs
import numpy as np

from trencadis.records import Drafts, Int32Array, Int64Array

__all__ = ["NO_DRAFTS", "DraftCounts", "added", "count_drafts"]


@attrs.frozen(kw_only=True)
class DraftCounts:
    """Drafts of one step. The position of a draft is the number of drafts before it on its way to the known tokens.

    Attributes:
        num_sequences: Sequences with drafts.
        num_drafted_by_position: Drafts verified at each position, from 0.
        num_accepted_by_position: Of these, those that were emitted; as long as the other.
    """

    num_sequences: int = 0
    num_drafted_by_position: tuple[int, ...] = ()
    num_accepted_by_position: tuple[int, ...] = ()

    @property
    def num_drafted(self) -> int:
        """Drafts at all positions."""
        return sum(self.num_drafted_by_position)

    @property
    def num_accepted(self) -> int:
        """Emitted drafts at all positions."""
        return sum(self.num_accepted_by_position)


NO_DRAFTS = DraftCounts()
"""Of a step without drafts."""


def count_drafts(drafts: Drafts | None, num_accepted: Int32Array) -> DraftCounts:
    """Return the counts of a step's drafts. Pure.

    Args:
        drafts: Of the plan.
        num_accepted: Emitted drafts of each sequence of the plan: the first ones of a chain, or a way down a tree.
    """
    if drafts is None:
        return NO_DRAFTS
    drafted = np.bincount(_positions(drafts))
    accepted = (num_accepted[:, None] > np.arange(len(drafted))).sum(0)
    return DraftCounts(
        num_sequences=int((drafts.num_drafts > 0).sum()),
        num_drafted_by_position=tuple(drafted.tolist()),
        num_accepted_by_position=tuple(accepted.tolist()),
    )


def added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sum of two counts by position; either may be longer. Pure."""
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


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
