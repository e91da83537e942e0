"""Weights stored as floats in safetensors files, as in most checkpoints."""

from __future__ import annotations

from collections import Counter

import torch

from trencadis_torch.linear.formats.mapped import MappedTensors
from trencadis_torch.linear.formats.source import WeightSource
from trencadis_torch.linear.held import FloatWeight

__all__ = ["FloatSource"]


class FloatSource(WeightSource):
    """Floats, a weight for each name.

    Args:
        tensors: The files.
    """

    def __init__(self, tensors: MappedTensors) -> None:
        self._tensors = tensors
        counts: Counter[torch.dtype] = Counter()
        for name in tensors.names():
            counts[tensors.dtype(name)] += torch.Size(tensors.shape(name)).numel()
        self._dtype = max(counts, key=counts.__getitem__, default=torch.float32)

    @property
    def format(self) -> str:
        """``safetensors`` and the dtype that most weights have."""
        return f"safetensors, {str(self._dtype).removeprefix('torch.')}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most weights have."""
        return self._dtype

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return self._tensors.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape."""
        return self._tensors.shape(name)

    def weight(self, name: str) -> FloatWeight:
        """Return a matrix as stored, a view of the file."""
        return FloatWeight(self._tensors.tensor(name))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as stored, a view of the file."""
        return self._tensors.tensor(name)

    def let_go(self) -> None:
        """Take the files' pages out of this process's memory."""
        self._tensors.let_go()
