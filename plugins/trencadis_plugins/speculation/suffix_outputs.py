"""Outputs of finished requests, to draft from: one tree for each tenant, so that nobody's text shows in another's speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from trencadis_plugins.speculation.suffix_tree import SuffixTree

__all__ = ["PastOutputs"]


class PastOutputs:
    """The latest outputs; the oldest of all tenants goes first.

    Args:
        max_depth: Longest run of tokens that is told apart.
        max_requests: The most outputs.
        max_tokens: Their most tokens; a longer output keeps its last ones.
    """

    def __init__(self, *, max_depth: int, max_requests: int, max_tokens: int) -> None:
        self._max_depth = max_depth
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._trees: dict[Hashable, SuffixTree] = {}
        self._queue: deque[tuple[Hashable, int]] = deque()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    def tree(self, key: Hashable) -> SuffixTree | None:
        """Return the tree of those who share a key, None if nothing of theirs is left. Pure."""
        return self._trees.get(key)

    def add(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Remember an output, and forget the oldest ones that are too many."""
        tokens = tokens[-self._max_tokens :] if self._max_tokens else ()
        if not tokens or not self._max_requests:
            return
        if key not in self._trees:
            self._trees[key] = SuffixTree(self._max_depth)
        self._trees[key].extend(tokens)
        self._trees[key].end_text()
        self._queue.append((key, len(tokens)))
        self.num_tokens += len(tokens)
        while self.num_tokens > self._max_tokens or len(self._queue) > self._max_requests:
            self._drop()

    def clear(self) -> None:
        """Forget all."""
        self._trees.clear()
        self._queue.clear()
        self.num_tokens = 0

    def _drop(self) -> None:
        key, num_tokens = self._queue.popleft()
        self.num_tokens -= num_tokens
        tree = self._trees[key]
        tree.drop_text(num_tokens)
        if tree.is_empty:
            del self._trees[key]
