"""Parts of a view for each of several speculators, and one ``Drafts`` of what they returned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.interfaces import DraftView
from trencadis.records import DraftDistributions, Drafts, Int32Array

__all__ = ["merged", "part_of"]


def part_of(view: DraftView, indices: Sequence[int], most: int) -> DraftView:
    """Return the view of some of its sequences, for a speculator of at most ``most`` drafts. Pure."""
    picks = np.array(indices, np.int64)
    return DraftView(
        slots=view.slots[picks],
        epochs=view.epochs[picks],
        token_ids=tuple(view.token_ids[i] for i in indices),
        max_draft_tokens=np.minimum(view.max_draft_tokens[picks], most).astype(np.int32),
        requests=tuple(view.requests[i] for i in indices),
        seeds=tuple(view.seeds[i] for i in indices),
        linear_only=view.linear_only[picks],
    )


def merged(parts: Sequence[Drafts], places: Int32Array, *, trees: bool) -> Drafts:
    """Return the drafts of several speculators as one record. Pure.

    Args:
        parts: What each returned.
        places: Where each sequence's drafts are among all of ``parts``, one after the other, int32 ``[num_sequences]``; -1: it has
            none.
        trees: Drafts may branch, so each has a parent.
    """
    counts: Int32Array = np.concatenate([part.num_drafts for part in parts] or [places[:0]])
    tokens: Int32Array = np.concatenate([part.token_ids for part in parts] or [places[:0]])
    if not len(tokens):
        empty = np.empty(0, np.int32)
        return Drafts(num_drafts=np.zeros(len(places), np.int32), token_ids=empty, parents=empty if trees else None)
    whole = Drafts(
        num_drafts=counts,
        token_ids=tokens,
        parents=np.concatenate([_parents(part) for part in parts]) if trees else None,
        distributions=_distributions(parts),
    )
    return whole.take(places, np.where(places >= 0, counts[places], 0).astype(np.int32))


def _parents(drafts: Drafts) -> Int32Array:
    if drafts.parents is not None:
        return drafts.parents
    counts = drafts.num_drafts
    first = np.repeat(np.cumsum(counts) - counts, counts)
    line: Int32Array = (np.arange(len(first)) - first - 1).astype(np.int32)
    return line


def _distributions(parts: Sequence[Drafts]) -> DraftDistributions | None:
    """Return the distributions of all drafts; certain ones among them have none."""
    known = [part.distributions for part in parts if part.distributions is not None]
    if not known:
        return None
    rows, num_rows = [], 0
    for part in parts:
        if part.distributions is None:
            rows.append(np.full(len(part.token_ids), -1, np.int32))
            continue
        own = part.distributions.rows
        rows.append(np.where(own >= 0, own + num_rows, -1).astype(np.int32))
        num_rows += len(part.distributions.probabilities)
    if len(known) == 1:
        return DraftDistributions(rows=np.concatenate(rows), probabilities=known[0].probabilities)
    import torch  # only speculators that have loaded it draw drafts by distributions

    return DraftDistributions(
        rows=np.concatenate(rows), probabilities=torch.cat([distributions.probabilities for distributions in known])
    )
