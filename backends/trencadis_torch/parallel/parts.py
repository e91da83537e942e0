"""Weights of a share by the share's own names: of each the part that a rank has, in the form that the files have it.

    name in the share ─▶ Piece ─▶ name in the whole model ─▶ NamedWeights ─▶ HeldWeight [N, K] ─▶ own outputs, or own inputs

Of a file of floats no more than the part is held, as a view of the file where outputs are divided. Where a format has to be unpacked, the
whole matrix is, one at a time, and the part is copied out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch

from trencadis_torch.linear.formats.gguf_blocks import BlocksWeight
from trencadis_torch.linear.held import FloatWeight, HeldWeight, JoinedWeight, Matrices, StackedWeight, with_zeros
from trencadis_torch.loading.named_weights import NamedWeights
from trencadis_torch.parallel.cuts import Cut
from trencadis_torch.parallel.reading import part_of
from trencadis_torch.parallel.sharding import Piece

__all__ = ["ShareWeights"]


class ShareWeights:
    """Weights of a share, a few at a time.

    Args:
        model: The share; its weights need no memory.
        pieces: By the ``id`` of each of its parameters; buffers are whole.
        weights: Those of the whole model.
    """

    def __init__(self, model: Any, pieces: Mapping[int, Piece], weights: NamedWeights) -> None:
        self._weights = weights
        self._shapes: dict[str, torch.Size] = {}
        self._pieces: dict[str, Piece] = {}
        self._shared: dict[str, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            piece = pieces.get(id(tensor), Piece((name,)))
            whole = next(filter(weights.has, piece.names), None)
            if whole is not None:
                self._shapes[name], self._pieces[name] = tensor.shape, piece
                self._shared.setdefault(whole, []).append(name)

    def has(self, name: str) -> bool:
        """Return whether there is a weight of that name in the share."""
        return name in self._pieces

    def matrix(self, name: str) -> HeldWeight | None:
        """Return this rank's part of a matrix that is in the files as it is; None: it is made of others, or not there."""
        piece = self._pieces.get(name)
        if piece is None or piece.transposed:
            return None
        if _is_empty(piece):
            return FloatWeight(torch.zeros(self._shapes[name]))
        whole = self._weights.matrix(self._whole(piece))
        return None if whole is None else _part(whole, piece.cut)

    def read(
        self,
        names: Iterable[str],
        is_matrix: Callable[[str], bool],
        is_stack: Callable[[str], bool] = lambda _: False,
    ) -> Iterator[tuple[str, HeldWeight | StackedWeight | torch.Tensor]]:
        """Yield this rank's parts of weights, as :meth:`NamedWeights.read` yields whole ones.

        Args:
            names: In the share.
            is_matrix: Whether a name is a matrix that may be held in a form of its own; any other comes as a tensor.
            is_stack: Whether a name is the matrices of a layer's experts.

        Raises:
            ModelLoadError: The source cannot read a tensor.
        """
        asked = set(names)
        for name in [name for name in asked if _is_empty(self._pieces[name])]:
            zeros = torch.zeros(self._shapes[name])
            yield name, FloatWeight(zeros) if is_matrix(name) else zeros
        wanted = {self._whole(self._pieces[name]) for name in asked if not _is_empty(self._pieces[name])}

        def comes_held(whole: str) -> bool:
            return all(is_matrix(name) and not self._pieces[name].transposed for name in self._shared.get(whole, ()))

        def comes_stacked(whole: str) -> bool:
            shared = self._shared.get(whole, ())
            return bool(shared) and all(map(is_stack, shared))

        for whole, weight in self._weights.read(wanted, comes_held, comes_stacked):
            for name in self._shared.get(whole, ()):
                if (name in asked or whole not in wanted) and not _is_empty(self._pieces[name]):
                    yield name, self._own(weight, self._pieces[name], is_matrix(name))
            del weight
            self.let_go()

    def let_go(self) -> None:
        """Take pages of mapped files out of this process's memory."""
        self._weights.let_go()

    def _whole(self, piece: Piece) -> str:
        return next(filter(self._weights.has, piece.names))

    @staticmethod
    def _own(
        weight: HeldWeight | StackedWeight | torch.Tensor, piece: Piece, is_matrix: bool
    ) -> HeldWeight | StackedWeight | torch.Tensor:
        if isinstance(weight, StackedWeight):
            return _some_experts(weight, piece.cut)
        if isinstance(weight, HeldWeight):
            held = _part(weight, piece.cut)
            return held if is_matrix else held.dequantised()
        part = part_of(weight, piece)
        return FloatWeight(part) if is_matrix else part


def _some_experts(stack: StackedWeight, cut: Cut | None) -> StackedWeight:
    """Return some of a layer's experts, or a part of each; one is read at a time."""
    if cut is None:
        return stack
    if cut.dim == 0:
        chosen = [expert for one in cut.ranges for expert in range(*one)]
        return attrs.evolve(stack, matrices=Matrices([partial(stack.matrices.__getitem__, one) for one in chosen]))
    own = attrs.evolve(cut, dim=int((cut.dim == 1) is stack.flipped))
    return attrs.evolve(stack, matrices=[_part(matrix, own) for matrix in stack.matrices])


def _is_empty(piece: Piece) -> bool:
    """Return whether a part is all zeros, and nothing is read for it. Pure."""
    return piece.cut is not None and not piece.cut.ranges


def _part(weight: HeldWeight, cut: Cut | None) -> HeldWeight:
    """Return a part of a matrix that holds no more than it: a view of a file, a copy, or what is still to be unpacked."""
    if cut is None:
        return weight
    if isinstance(weight, JoinedWeight) and cut.dim == 1:
        return attrs.evolve(weight, parts=[_part(part, cut) for part in weight.parts])
    if len(cut.ranges) > 1:
        rows = torch.cat([torch.arange(*one) for one in cut.ranges])
        return _alone(weight.rows(rows)) if cut.dim == 0 else FloatWeight(cut.take(weight.dequantised()))
    one = slice(*cut.ranges[0])
    part = weight.rows(one) if cut.dim == 0 else weight.columns(one)
    missing = cut.size - part.shape[cut.dim]
    return with_zeros(part, missing) if missing or cut.dim else _alone(part)


def _alone(part: HeldWeight) -> HeldWeight:
    """Return some outputs of a matrix so that the others are not held."""
    if isinstance(part, JoinedWeight):
        return attrs.evolve(part, parts=[_alone(one) for one in part.parts])
    return part if _is_of_a_file(part) or isinstance(part, BlocksWeight) else with_zeros(part, 0)


def _is_of_a_file(weight: HeldWeight) -> bool:
    """Return whether a matrix lies in memory that PyTorch did not allocate: that of a mapped file. Pure."""
    return isinstance(weight, FloatWeight) and not weight.values.untyped_storage().resizable()
