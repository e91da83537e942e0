"""Draft trees while they grow, level by level.

ask ─ nodes that need children ─▶ one forward ─ the most likely tokens after each ─▶ tell ─▶ ask … finish
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import attrs
import numpy as np

from trencadis.interfaces import DraftView
from trencadis.records import Int32Array, Request
from trencadis_plugins.speculation.draft_config import TreeConfig
from trencadis_plugins.speculation.draft_tree_shapes import SiblingAcceptance, TreeShape, best_shape, chain, layered

__all__ = ["GrowingTree", "ShapedTree", "TopKTree", "Trees"]


@attrs.define
class _Node:
    token: int
    parent: int
    rank: int
    depth: int
    score: float


class GrowingTree(ABC):
    """A tree whose nodes are known up to some depth."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._asked: list[int] = []
        self._place: dict[int, int] = {-1: -1}
        self._newest: list[int] = []

    @abstractmethod
    def ask(self) -> int:
        """Choose the nodes of the newest level that need children; returns how many, 0 if the tree has grown."""

    @abstractmethod
    def tell(self, ranked: list[list[tuple[int, float]]]) -> None:
        """Receives the most likely tokens, best first, with their log-probabilities.

        Args:
            ranked: After the newest token, at the first call; then after each node that was asked for last.
        """

    @abstractmethod
    def finish(self) -> tuple[Int32Array, Int32Array, TreeShape]:
        """Return tokens and parents of the drafts, and their shape."""

    @property
    def newest(self) -> tuple[Int32Array, Int32Array]:
        """Tokens of the nodes that were asked for last, and their parents among all of them."""
        count = len(self._newest)
        return self.guesses[len(self._asked) - count :], self.parents[len(self._asked) - count :]

    @property
    def guesses(self) -> Int32Array:
        """Tokens of every node that was ever asked for, parents first."""
        return _array([self._nodes[node].token for node in self._asked])

    @property
    def parents(self) -> Int32Array:
        """The parent of each, among them."""
        return _array([self._place[self._nodes[node].parent] for node in self._asked])

    def _ask_for(self, nodes: list[int]) -> int:
        self._newest = nodes
        for node in nodes:
            self._place[node] = len(self._asked)
            self._asked.append(node)
        return len(nodes)

    def _add(self, parent: int, rank: int, token: int, logprob: float) -> None:
        before = self._nodes[parent] if parent >= 0 else None
        depth, score = (0, 0.0) if before is None else (before.depth, before.score)
        self._nodes.append(_Node(token, parent, rank, depth + 1, score + logprob))

    def _picked(self, chosen: list[int]) -> tuple[Int32Array, Int32Array, TreeShape]:
        place = {-1: -1, **{node: i for i, node in enumerate(chosen)}}
        nodes = [self._nodes[node] for node in chosen]
        shape = TreeShape(tuple(place[node.parent] for node in nodes), tuple(node.rank for node in nodes))
        return _array([node.token for node in nodes]), _array(list(shape.parents)), shape


class TopKTree(GrowingTree):
    """Grows where the draft model believes it goes on.

    At each depth the nodes of the largest cumulative probability get children; in the end the likeliest of all nodes stay. A
    node is no likelier than its parent, and among equals the shallower comes first, so they are a tree.

    Source: Li et al., "EAGLE-2: faster inference of language models with dynamic draft trees", 2024, section 4.

    Args:
        size: Most drafts.
        width: Nodes with children at each depth, and children of each.
        depth: Most drafts after one another.
    """

    def __init__(self, *, size: int, width: int, depth: int) -> None:
        super().__init__()
        self._size, self._width, self._most = size, width, min(depth, size)
        self._level = 0
        self._first = 0

    def ask(self) -> int:
        """Choose the likeliest nodes of the newest level."""
        if self._level >= self._most:
            return self._ask_for([])
        fresh = range(self._first, len(self._nodes))
        best = sorted(fresh, key=lambda node: -self._nodes[node].score)[: self._width]
        return self._ask_for(sorted(best))

    def tell(self, ranked: list[list[tuple[int, float]]]) -> None:
        """Add ``width`` children of each."""
        self._first = len(self._nodes)
        self._level += 1
        for parent, children in zip(self._newest or [-1], ranked, strict=True):
            for rank, (token, logprob) in enumerate(children[: self._width]):
                self._add(parent, rank, token, logprob)

    def finish(self) -> tuple[Int32Array, Int32Array, TreeShape]:
        """Return the likeliest nodes, likeliest first."""
        order = sorted(range(len(self._nodes)), key=lambda n: (-self._nodes[n].score, self._nodes[n].depth, n))
        return self._picked(order[: self._size])


class ShapedTree(GrowingTree):
    """Grows into a given shape.

    Args:
        shape: Shape of at least one node.
    """

    def __init__(self, shape: TreeShape) -> None:
        super().__init__()
        self._shape = shape
        self._of: dict[int, int] = {}  # node of the shape to node of the tree
        self._level = [-1]

    def ask(self) -> int:
        """Choose the nodes of the newest level that have children in the shape."""
        inner = set(self._shape.parents)
        self._level = [node for node in self._level if node in inner]
        return self._ask_for([self._of[node] for node in self._level])

    def tell(self, ranked: list[list[tuple[int, float]]]) -> None:
        """Add the children that the shape has."""
        fresh: list[int] = []
        for parent, children in zip(self._level, ranked, strict=True):
            for node, (above, rank) in enumerate(zip(self._shape.parents, self._shape.ranks, strict=True)):
                if above == parent:
                    self._of[node] = len(self._nodes)
                    self._add(self._of.get(parent, -1), rank, *children[rank])
                    fresh.append(node)
        self._level = fresh

    def finish(self) -> tuple[Int32Array, Int32Array, TreeShape]:
        """Return the nodes in the order of the shape."""
        return self._picked([self._of[node] for node in range(len(self._shape.parents))])


class Trees:
    """The trees of all sequences, and how often their nodes became the text.

    Args:
        config: How drafts branch.
        max_draft_tokens: Most drafts of a sequence in a step.

    Attributes:
        branch: Drafts do branch.
    """

    def __init__(self, config: TreeConfig, *, max_draft_tokens: int) -> None:
        self._config, self._most = config, max_draft_tokens
        self.branch = config.tree != "none"
        self._acceptance = SiblingAcceptance(config.tree_width)
        self._grown: dict[int, tuple[Request, int, Int32Array, TreeShape]] = {}

    @property
    def num_ranked(self) -> int:
        """The most likely tokens that are asked for after a node; 0: drafts do not branch."""
        config = self._config
        if config.tree == "none":
            return 0
        return max(config.tree_width, *config.tree_shape) if config.tree == "static" else config.tree_width

    def plant(self, count: int, *, is_linear: bool) -> GrowingTree:
        """Return a tree of at most so many drafts, which may have to follow each other."""
        config = self._config
        if is_linear:
            return ShapedTree(chain(count))
        if config.tree == "top_k":
            return TopKTree(size=count, width=config.tree_width, depth=config.tree_depth)
        if config.tree == "static":
            return ShapedTree(layered(config.tree_shape, most=count))
        rates = self._acceptance.rates
        return ShapedTree(best_shape(rates, size=self._most, depth=config.tree_depth).first(count))

    def remember(self, slot: int, request: Request, size: int, tokens: Int32Array, shape: TreeShape) -> None:
        """Keep a tree until the text after it is known, where shapes follow from that.

        Args:
            slot: Slot of the sequence.
            request: Request of the sequence.
            size: Tokens of its text.
            tokens: Nodes of the tree, in tokens of the text.
            shape: Their shape.
        """
        if self._config.tree == "sequoia":
            self._grown[slot] = (request, size, tokens, shape)

    def observe(self, view: DraftView) -> None:
        """Measure which children of the last trees became the text."""
        for index, slot in enumerate(view.slots.tolist() if self._grown else ()):
            request, size, tokens, shape = self._grown.pop(slot, (None, 0, _array([]), chain(0)))
            followed = view.token_ids[index][size:]
            if request is view.requests[index] and len(followed):
                self._acceptance.observe(tokens, shape, followed)

    def forget(self, slot: int) -> None:
        """Forget the last tree of a sequence."""
        self._grown.pop(slot, None)


def _array(numbers: list[int]) -> Int32Array:
    return np.array(numbers, np.int32)
