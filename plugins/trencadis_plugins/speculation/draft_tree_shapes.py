"""Shapes of draft trees: fixed ones, and the one from which most tokens are to be expected.

A shape says of each node after which one it stands, and which of that one's children it is: the b-th most likely. Nodes come
parents first, and any first few of them are a shape again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.records import Int32Array

__all__ = ["SiblingAcceptance", "TreeShape", "best_shape", "chain", "expected_tokens", "layered"]


@attrs.frozen
class TreeShape:
    """A tree without tokens.

    Attributes:
        parents: Parent of each node, -1 for the newest token.
        ranks: Which child of its parent it is, from 0.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def first(self, count: int) -> TreeShape:
        """Return the tree of the first nodes. Pure."""
        return TreeShape(self.parents[:count], self.ranks[:count])


def chain(length: int) -> TreeShape:
    """Return the shape of drafts that follow each other. Pure."""
    return TreeShape(tuple(range(-1, length - 1)), (0,) * length)


def layered(branches: Sequence[int], *, most: int) -> TreeShape:
    """Return the shape in which every node of a depth has as many children, at most ``most`` nodes in all. Pure.

    Args:
        branches: Children of each node, depth by depth, each at least 1.
        most: Where it is cut.
    """
    parents: list[int] = []
    ranks: list[int] = []
    layer = [-1]
    for width in branches:
        first = len(parents)
        parents += [node for node in layer for _ in range(width)]
        ranks += [rank for _ in layer for rank in range(width)]
        layer = list(range(first, len(parents)))
        if len(parents) >= most:
            break
    return TreeShape(tuple(parents[:most]), tuple(ranks[:most]))


def expected_tokens(shape: TreeShape, rates: Sequence[float]) -> float:
    """Return how many tokens a step is expected to yield, its own one included. Pure.

    Args:
        shape: Shape of the drafts.
        rates: How often the b-th child of a node that was reached is the one that is accepted, 0 .. 1 each, sum at most 1.
    """
    return 1.0 + sum(_reached(shape, rates))


def _reached(shape: TreeShape, rates: Sequence[float]) -> list[float]:
    found: list[float] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        found.append(rates[rank] * (1.0 if parent < 0 else found[parent]))
    return found


@functools.lru_cache(maxsize=64)
def best_shape(rates: tuple[float, ...], *, size: int, depth: int) -> TreeShape:
    """Return the shape from which most tokens are to be expected. Pure; O(size² · depth · width).

    With F(n, d, b) the most tokens to be expected of n nodes, their root included, at most d deep, with b children at the root:
    ``F(n, d, b) = max over y of F(y, d, b - 1) + rates[b] · max over b' of F(n - y, d - 1, b')``.

    Source: Chen et al., "Sequoia: scalable, robust, and hardware-aware speculative decoding", 2024, section 3.1.

    Args:
        rates: Acceptance rates; see :func:`expected_tokens`; there are no more children than rates.
        size: Most nodes.
        depth: Most nodes after one another.
    """
    table = _Table(rates, size + 1, depth)
    parents: list[int] = []
    ranks: list[int] = []
    table.collect(size + 1, depth, -1, parents, ranks)
    shape = TreeShape(tuple(parents), tuple(ranks))
    reached = _reached(shape, rates)
    # The likeliest first: whatever is cut off is what is missed least. A child is no likelier than its parent.
    order = sorted(range(len(parents)), key=lambda node: (-reached[node], node))
    place = {node: i for i, node in enumerate(order)}
    return TreeShape(
        tuple(place[parents[node]] if parents[node] >= 0 else -1 for node in order),
        tuple(ranks[node] for node in order),
    )


class _Table:
    """Best values and choices, by most nodes with the root and by depth."""

    def __init__(self, rates: Sequence[float], size: int, depth: int) -> None:
        self._best = [np.ones(size + 1)]  # of a root alone; index 0 is not used
        self._num_children = [np.zeros(size + 1, np.int64)]
        self._splits: list[list[np.ndarray]] = [[]]
        for _ in range(depth):
            values, splits = _add_children(self._best[-1], rates, size)
            self._num_children.append(np.argmax(values, axis=0))
            self._best.append(np.max(values, axis=0))
            self._splits.append(splits)

    def collect(self, size: int, depth: int, root: int, parents: list[int], ranks: list[int]) -> None:
        """Append the nodes below a root, which has ``size`` nodes with itself and ``depth`` more levels."""
        shares = []
        for rank in range(int(self._num_children[depth][size]), 0, -1):
            kept = int(self._splits[depth][rank - 1][size])
            shares.append(size - kept)
            size = kept
        for rank, share in enumerate(reversed(shares)):
            parents.append(root)
            ranks.append(rank)
            self.collect(share, depth - 1, len(parents) - 1, parents, ranks)


def _add_children(below: np.ndarray, rates: Sequence[float], size: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return values ``[1 + width, 1 + size]`` by number of children, and for each child how many nodes stay for the others."""
    values = np.full((1 + len(rates), size + 1), -np.inf)
    values[0, 1:] = 1.0
    splits = []
    for rank, rate in enumerate(rates):
        split = np.zeros(size + 1, np.int64)
        for nodes in range(2, size + 1):
            kept = np.arange(1, nodes)
            found = values[rank, kept] + rate * below[nodes - kept]
            best = int(np.argmax(found))
            values[rank + 1, nodes], split[nodes] = found[best], kept[best]
        splits.append(split)
    return values, splits


class SiblingAcceptance:
    """How often the b-th child of a node that was reached turned out to be the text.

    Args:
        width: Most children.
    """

    WEIGHT = 20.0
    """Nodes that the first belief is worth."""

    def __init__(self, width: int) -> None:
        belief = 0.6 * 0.3 ** np.arange(width)
        self._hits = self.WEIGHT * belief
        self._visits = np.full(width, self.WEIGHT)
        self.num_observed = 0

    @property
    def rates(self) -> tuple[float, ...]:
        """A rate for each child; rounded, so that a little more evidence does not mean another shape."""
        return tuple(round(float(rate), 2) for rate in self._hits / self._visits)

    def observe(self, tokens: Int32Array, shape: TreeShape, followed: Int32Array) -> None:
        """Count one tree.

        Args:
            tokens: Tokens of the nodes.
            shape: Shape of the tree.
            followed: The text that came after its root.
        """
        here = -1
        for token in followed.tolist():
            children = [node for node, parent in enumerate(shape.parents) if parent == here]
            if not children:
                break
            self._visits[: len(children)] += 1
            hits = [node for node in children if tokens[node] == token]
            if not hits:
                break
            here = hits[0]
            self._hits[shape.ranks[here]] += 1
        self.num_observed += 1
