"""Drafts as a fake backend sees them: trees of tokens, and the path that the "model" itself would have taken. All pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.errors import StepFailedError
from trencadis.records import Drafts

__all__ = ["DraftTree", "accepted_path"]


class DraftTree:
    """The drafts of one sequence.

    Attributes:
        tokens: The drafts.
        parents: Index of the draft before each, -1 for the newest token.
        depths: 1 for a draft after the newest token.

    Args:
        drafts: Drafts of a batch, or None.
        index: Which sequence of its plan.
        branching: Whether drafts may branch.

    Raises:
        StepFailedError: A draft comes before its parent, or drafts branch that may not.
    """

    def __init__(self, drafts: Drafts | None, index: int, *, branching: bool) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        if drafts is not None and drafts.num_drafts[index]:
            which = np.array([index], np.int32)
            mine = drafts.take(which, drafts.num_drafts[which])
            self.tokens = mine.token_ids.tolist()
            linear = list(range(-1, len(self.tokens) - 1))
            self.parents = linear if mine.parents is None else mine.parents.tolist()
            if self.parents != linear and not branching:
                raise StepFailedError("drafts branch on a backend that does not provide backend.tree_attention")
        self.depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise StepFailedError(f"draft {node} comes before its parent, {parent}")
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)

    def __len__(self) -> int:
        return len(self.tokens)


def accepted_path(tree: DraftTree, following: Sequence[int]) -> list[int]:
    """Return the drafts that the model would have emitted, from the first one on.

    Args:
        tree: The drafts.
        following: The token after the newest token, then after each draft.
    """
    path: list[int] = []
    here = -1
    while True:
        later = [node for node in range(here + 1, len(tree)) if tree.parents[node] == here]
        right = [node for node in later if tree.tokens[node] == following[here + 1]]
        if not right:
            return path
        here = right[0]
        path.append(here)
