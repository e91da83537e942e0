"""Modules that hold a rank's part of a weight, and what they exchange with the other ranks.

    GatheredLinear   some of the outputs ─▶ all_gather ─▶ all outputs
    RowLinear        some of the inputs ─▶ partial sums ─▶ all_reduce ─▶ + bias, once
    VocabEmbedding   some of the rows, zeros for tokens of other ranks ─▶ all_reduce

Each has its weight in a child ``local`` of the plain kind, which may be packed like any other. A layer that divides its outputs and gathers
nothing is a plain one with fewer outputs, and needs no module. Whole experts are in ``experts.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from trencadis.interfaces import Collective

__all__ = ["GatheredLinear", "RowLinear", "Summed", "SupportsSums", "VocabEmbedding", "sum_outputs", "summing"]


@runtime_checkable
class SupportsSums(Protocol):
    """A group whose sums are part of graphs, in which nothing may be overwritten."""

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, the same bits on every rank.

        Raises:
            CollectiveError: The ranks do not call the same, or one of them has ended.
        """
        ...


def summing(group: Collective) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from a tensor to the sum of the ranks' tensors, which may overwrite what it is given.

    Args:
        group: The ranks.
    """
    if isinstance(group, SupportsSums):
        return group.summed

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        group.all_reduce(tensor)
        return tensor

    return summed


class GatheredLinear(nn.Module):
    """A linear layer, each rank of which computes some outputs and gets all.

    Args:
        local: The outputs of this rank.
        out_features: Outputs of all ranks; those that ranks compute beyond are padding, and cut off.
        group: The ranks.

    Attributes:
        in_features: Inputs.
    """

    def __init__(self, local: nn.Module, out_features: int, group: Collective) -> None:
        super().__init__()
        self.local = local
        self.in_features = local.in_features
        self.out_features = out_features
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` on every rank."""
        return self._group.all_gather(self.local(x))[..., : self.out_features]


class RowLinear(nn.Module):
    """A linear layer, each rank of which has some inputs; the ranks' outputs are summed, then the bias is added once.

    Args:
        local: The inputs of this rank, without bias.
        bias: Bias of all outputs, or None.
        group: The ranks.
        splits: The input is whole, and this rank's part is taken first.
    """

    def __init__(self, local: nn.Module, bias: nn.Parameter | None, group: Collective, *, splits: bool = False) -> None:
        super().__init__()
        self.local = local
        self.bias = bias
        self._group = group
        self._sum = summing(group)
        self._splits = splits

    def around(self, local: nn.Module) -> RowLinear:
        """Return the same with other local weights."""
        return RowLinear(local, self.bias, self._group, splits=self._splits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., N]`` on every rank."""
        if self._splits:
            width = x.shape[-1] // self._group.size
            x = x[..., self._group.rank * width : (self._group.rank + 1) * width].contiguous()
        out = self._sum(self.local(x))
        return out if self.bias is None else out + self.bias


class VocabEmbedding(nn.Module):
    """Embeddings, each rank of which has those of some tokens.

    Args:
        local: The rows of this rank; its own scale, if it has one, is kept.
        first: Token of the first row.
        num_rows: Rows that are tokens; those after them are padding.
        group: The ranks.
    """

    def __init__(self, local: nn.Module, *, first: int, num_rows: int, group: Collective) -> None:
        super().__init__()
        self.local = local
        self._first = first
        self._num_rows = num_rows
        self._sum = summing(group)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return ``[..., K]`` from ids ``[...]``, on every rank."""
        rows, is_other = self.rows(input_ids)
        return self._sum(self.local(rows).masked_fill(is_other[..., None], 0))

    def rows(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which rows here are those of ids ``[...]``, the first for those of other ranks; and which these are. Pure."""
        rows = input_ids - self._first
        is_other = (rows < 0) | (rows >= self._num_rows)
        return rows.masked_fill(is_other, 0), is_other


class Summed(nn.Module):
    """A module whose outputs are summed over the ranks, each of which has a part of it.

    Args:
        local: This rank's part.
        group: The ranks.
    """

    def __init__(self, local: nn.Module, group: Collective) -> None:
        super().__init__()
        self.local = local
        self._sum = summing(group)

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        """Return the sum of what the ranks' parts return."""
        return self._sum(self.local(*args, **options))


def sum_outputs(module: nn.Module, group: Collective) -> None:
    """Let a module's output be the sum over the ranks, each of which has a part of it; the module stays itself."""
    summed = summing(group)
    module.register_forward_hook(lambda _, __, output: summed(output))
