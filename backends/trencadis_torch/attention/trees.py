"""Drafts that branch: which node sees which, at what position, and where accepted ones move.

    row of tokens      … 7 8 9 │ n1 n2 n3 n4     the drafts lie after the newest token in their order
    tree               9 ─ n1 ─ n2, 9 ─ n3 ─ n4
    positions          … 8 9 10 │ 11 12 11 12    a node's place in the text, not in the row
    n3 n4 accepted     … 7 8 9 │ n3 n4           tokens and KV move to where the text has them

Shapes: S sequences of a pass, K most nodes of one: node 0 is its newest token, node i + 1 its draft i.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.errors import StepFailedError
from trencadis.records import BoolArray, Drafts, Int32Array, Int64Array, Pass
from trencadis_torch.device import to_device

__all__ = ["DraftTrees", "Histories"]


@attrs.frozen(kw_only=True, eq=False)
class Histories:
    """Token histories for the sampler where drafts branch.

    Attributes:
        tokens: A row for each path to a leaf, int32 ``[num_paths, longest]`` on the device.
        rows: Row of ``tokens`` that has each node's history, int64 ``[S, K]``.
    """

    tokens: torch.Tensor
    rows: Int64Array


@attrs.frozen(kw_only=True, eq=False)
class DraftTrees:
    """The drafts of a pass, some of which branch; on the host.

    Attributes:
        rows: Row of each sequence, ``[S]``.
        roots: Position of each sequence's newest token, ``[S]``.
        num_drafts: Number of drafts of each sequence, ``[S]``.
        branches: Whether two drafts of a sequence follow one node, bool ``[S]``.
        parents: Node before each node, int64 ``[S, K]``; 0 of node 0 and of padding.
        ancestors: Whether a node follows another one or is it, bool ``[S, K, K]``.
        depths: Nodes between each one and its root, itself included, int64 ``[S, K]``; 0 of padding.
    """

    rows: Int32Array
    roots: Int32Array
    num_drafts: Int32Array
    branches: BoolArray
    parents: Int64Array
    ancestors: BoolArray
    depths: Int64Array

    @classmethod
    def of(cls, one: Pass, drafts: Drafts | None) -> DraftTrees | None:
        """Return the trees of a pass, or None if no draft of it branches. Pure.

        Raises:
            StepFailedError: A tree hangs on more than the newest token, or a draft comes before its parent.
        """
        if drafts is None or drafts.parents is None:
            return None
        mine = drafts.take(one.indices, drafts.num_drafts[one.indices])
        counts = mine.num_drafts
        if mine.parents is None or not len(mine.parents):
            return None
        owners = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        branches = np.zeros(len(counts), np.bool_)
        branches[owners[mine.parents != within - 1]] = True
        if not branches.any():
            return None
        _check(one, counts, branches, mine.parents, within)
        parents = np.zeros((len(counts), 1 + int(counts.max())), np.int64)
        parents[owners, 1 + within] = 1 + mine.parents
        ancestors = _ancestors(parents, counts)
        return cls(
            rows=one.rows,
            roots=one.starts + one.query_lens - 1 - counts,
            num_drafts=counts,
            branches=branches,
            parents=parents,
            ancestors=ancestors,
            depths=np.maximum(ancestors.sum(2) - 1, 0),
        )

    def take(self, sequences: Int64Array) -> DraftTrees:
        """Return the trees of some sequences of the pass. Pure."""
        return DraftTrees(**{field.name: getattr(self, field.name)[sequences] for field in attrs.fields(DraftTrees)})

    @property
    def max_depth(self) -> int:
        """Largest depth of all nodes."""
        return int(self.depths.max())

    def positions(self, positions: Int64Array, firsts: Int64Array) -> Int64Array:
        """Return the positions of a pass's tokens, ``[T]``: those given, but of the drafts by their depths. Pure.

        Args:
            positions: Positions by which all drafts would be linear, ``[T]``.
            firsts: Index of each sequence's newest token among the T, ``[S]``.
        """
        found = positions.copy()
        nodes = np.arange(self.depths.shape[1])
        is_real = (nodes <= self.num_drafts[:, None]) & self.branches[:, None]
        found[(firsts[:, None] + nodes)[is_real]] = (self.roots[:, None] + self.depths)[is_real]
        return found

    def histories(self, tokens: torch.Tensor) -> Histories:
        """Return the tokens up to each node: a row for each leaf, which serves all nodes on the way to it.

        Args:
            tokens: Tokens of every row, the drafts after the newest token in their order, int32 ``[num_rows, width]`` on the device.
        """
        num_sequences, num_nodes = self.parents.shape
        everyone = np.arange(num_sequences)
        leaves = np.tile(np.arange(num_nodes), (num_sequences, 1))
        for node in range(num_nodes - 1, 0, -1):
            real = everyone[node <= self.num_drafts]
            leaves[real, self.parents[real, node]] = leaves[real, node]
        is_real = np.arange(num_nodes) <= self.num_drafts[:, None]
        is_leaf = is_real & (leaves == np.arange(num_nodes))
        owners, ends = np.nonzero(is_leaf)
        numbers = np.zeros(self.parents.shape, np.int64)
        numbers[is_leaf] = np.arange(len(owners))
        paths, nodes = np.nonzero(self.ancestors[owners, ends])
        of = owners[paths]
        places = np.stack([paths, self.roots[of] + self.depths[of, nodes], self.rows[of], self.roots[of] + nodes])
        width = int(self.roots.max()) + self.max_depth + 1
        path, column, row, source = to_device(places.astype(np.int64), tokens.device)
        known = tokens.index_select(0, to_device(self.rows[owners].astype(np.int64), tokens.device))[:, :width]
        return Histories(
            tokens=known.index_put((path, column), tokens[row, source]),
            rows=np.take_along_axis(numbers, leaves, axis=1),
        )

    def moves(self, paths: torch.Tensor, num_accepted: torch.Tensor, sequences: Int64Array) -> torch.Tensor:
        """Return from where to where KV must move for accepted drafts to lie after each other.

        What does not move is moved onto itself: how much stands is not known on the host. No place is written twice.

        Args:
            paths: Node of each accepted draft, int64 ``[len(sequences), most]``; beyond the accepted ones anything.
            num_accepted: int64 ``[len(sequences)]``.
            sequences: Which, indices into the pass.

        Returns:
            Row, column to read and column to write, int64 ``[3, n]`` on the device.
        """
        reaches = np.where(self.branches, self.depths.max(1), 0)[sequences]
        owners = np.repeat(np.arange(len(sequences)), reaches)
        steps = np.arange(len(owners)) - np.repeat(np.cumsum(reaches) - reaches, reaches)
        places = np.stack([owners, steps, self.rows[sequences][owners], self.roots[sequences][owners]])
        owner, step, row, root = to_device(places.astype(np.int64), paths.device)
        node = torch.where(step < num_accepted[owner], paths[owner, step], step + 1)
        return torch.stack([row, root + node, root + step + 1])


def _check(one: Pass, counts: Int32Array, branches: BoolArray, parents: Int32Array, within: Int64Array) -> None:
    if (one.query_lens[branches] != 1 + counts[branches]).any():
        raise StepFailedError(
            f"drafts branch after {(one.query_lens - counts)[branches].tolist()} tokens of their sequences: it must be 1."
        )
    if (parents < -1).any() or (parents >= within).any():
        raise StepFailedError(f"a draft comes before its parent: parents are {parents.tolist()}.")


def _ancestors(parents: Int64Array, counts: Int32Array) -> npt.NDArray[np.bool_]:
    num_sequences, num_nodes = parents.shape
    everyone = np.arange(num_sequences)
    found = np.zeros((num_sequences, num_nodes, num_nodes), np.bool_)
    found[:, 0, 0] = True
    for node in range(1, num_nodes):
        real = everyone[node <= counts]
        found[real, node] = found[real, parents[real, node]]
        found[real, node, node] = True
    return found
