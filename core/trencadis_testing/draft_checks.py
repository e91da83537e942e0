"""What is wrong with drafts, in words. All pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trencadis.interfaces import DraftView
from trencadis.records import DraftDistributions, Drafts

__all__ = ["broken_distributions", "broken_shapes", "broken_trees"]


def broken_shapes(drafts: Drafts, view: DraftView, *, vocab_size: int) -> list[str]:
    """Return what is wrong with the number of drafts, their types and their token ids.

    Args:
        drafts: Drafts that a speculator returned.
        view: For what.
        vocab_size: Token ids are below it.
    """
    counts, tokens, most = drafts.num_drafts, drafts.token_ids, view.max_draft_tokens
    faults = [f"an array of the drafts is {a.dtype}, not int32" for a in (counts, tokens) if a.dtype != np.int32]
    if counts.shape != most.shape:
        return [*faults, f"num_drafts has the shape {counts.shape} for {len(most)} sequences"]
    if ((counts < 0) | (counts > most)).any():
        faults.append(f"drafted {counts}, allowed are {most}")
    if tokens.shape != (counts.sum(),):
        faults.append(f"{tokens.shape} tokens for {counts}")
    if ((tokens < 0) | (tokens >= vocab_size)).any():
        faults.append(f"not all are token ids below {vocab_size}: {tokens}")
    return faults


def broken_trees(drafts: Drafts, view: DraftView, *, drafts_trees: bool) -> list[str]:
    """Return what is wrong with the parents of drafts.

    Args:
        drafts: Drafts that a speculator returned; their shapes are right.
        view: For what.
        drafts_trees: The speculator's own ``drafts_trees``.
    """
    parents, counts = drafts.parents, drafts.num_drafts
    if parents is None:
        return []
    if parents.dtype != np.int32 or parents.shape != drafts.token_ids.shape:
        return [f"parents are {parents.dtype}{list(parents.shape)} for {len(drafts.token_ids)} drafts"]
    faults, start = [], 0
    for i, count in enumerate(counts.tolist()):
        tokens, own = drafts.token_ids[start : start + count].tolist(), parents[start : start + count].tolist()
        start += count
        if any(not -1 <= parent < j for j, parent in enumerate(own)):
            faults.append(f"sequence {i}: a draft comes before its parent in {own}")
        if len(set(zip(own, tokens, strict=True))) < count:
            faults.append(f"sequence {i}: two drafts after one token are the same: {tokens} after {own}")
        if own != list(range(-1, count - 1)) and (view.linear_only[i] or not drafts_trees):
            faults.append(f"sequence {i}: drafts branch where they must not: {own}")
    return faults


def broken_distributions(drafts: Drafts) -> list[str]:
    """Return what is wrong with the distributions that drafts were drawn by; their shapes and parents are right."""
    distributions = drafts.distributions
    if distributions is None:
        return []
    rows, probabilities = distributions.rows, _on_host(distributions)
    if rows.dtype != np.int32 or rows.shape != drafts.token_ids.shape:
        return [f"rows of distributions are {rows.dtype}{list(rows.shape)} for {len(drafts.token_ids)} drafts"]
    if ((rows < -1) | (rows >= len(probabilities))).any():
        return [f"rows {rows} of {len(probabilities)} distributions"]
    faults = []
    if (probabilities < 0).any() or not np.allclose(probabilities.sum(-1), 1.0, atol=1e-3):
        faults.append(f"not every distribution sums to 1: {probabilities.sum(-1)}")
    drawn = rows >= 0
    if not (probabilities[rows[drawn], drafts.token_ids[drawn]] > 0).all():
        faults.append("a draft was drawn that is impossible under its distribution")
    return faults


def _on_host(distributions: DraftDistributions) -> NDArray[np.float64]:
    probabilities: Any = distributions.probabilities
    if hasattr(probabilities, "detach"):
        probabilities = probabilities.detach().double().cpu().numpy()
    return np.asarray(probabilities, np.float64)
