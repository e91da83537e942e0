"""Linear layers whose weights are packed once, and embeddings that read their rows out of a packed output projection.

    PackedLinear   float32, by linear.cpp: a row's bits depend on that row alone
    BlockedLinear  float32, by oneDNN through torch, where there is no compiler: low bits may depend on how many rows there are
    Int8Linear     int8 weights, one scale for each output; activations int8, one scale for each row; sums are exact

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import torch
from torch import nn

from trencadis_torch.linear.native import Native

__all__ = ["BlockedLinear", "FusedLinear", "Int8Linear", "PackedLinear", "RowsEmbedding", "quantise"]

AT_ONCE: Final = 1 << 18
"""Weights that are rounded at a time."""


class FusedLinear(nn.Module):
    """One linear layer in place of one or several that have the same input: their outputs stand side by side.

    Args:
        layers: What it stands for; they may be let go of afterwards.

    Attributes:
        in_features: K.
        out_features: N, of all together.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.in_features = layers[0].in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self._bias = _side_by_side_biases(layers)

    @property
    @abstractmethod
    def weights_bytes(self) -> int:
        """Memory of the weights."""

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., N]`` from ``[..., K]``."""


class PackedLinear(FusedLinear):
    """float32 weights in panels.

    Args:
        layers: What it stands for.
        native: The library.
    """

    def __init__(self, layers: list[nn.Linear], native: Native) -> None:
        super().__init__(layers)
        self._native = native
        self._weights = native.pack_float(*_weights_of(layers))

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights."""
        return self._weights.nbytes + (0 if self._bias is None else self._bias.nbytes)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Packed weights, scales and sums of int8 weights or None, and biases or None."""
        return self._weights, None, None, self._bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., N]`` from float32 ``[..., K]``."""
        return self._native.linear_float(x, self._weights, self._bias, self.out_features)

    def rows(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Return rows of the weights, times a scale, ``[..., K]``."""
        return self._native.rows_float(ids, self._weights, (self.out_features, self.in_features), scale)


class Int8Linear(FusedLinear):
    """int8 weights in panels.

    Args:
        layers: What it stands for.
        native: The library.
    """

    def __init__(self, layers: list[nn.Linear], native: Native) -> None:
        super().__init__(layers)
        self._native = native
        weights, scales = zip(*map(quantise, _weights_of(layers)), strict=True)
        self._weights, self._sums = native.pack_int8(*weights)
        self._scales = torch.zeros(len(self._sums))
        torch.cat(scales, out=self._scales[: self.out_features])

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights, with scales and sums."""
        parts = (self._weights, self._scales, self._sums, self._bias)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """As in :class:`PackedLinear`."""
        return self._weights, self._scales, self._sums, self._bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., N]`` from ``[..., K]``."""
        return self._native.linear_int8(
            x.float(), self._weights, self._scales, self._sums, self._bias, self.out_features
        )

    def rows(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Return rows of the weights as they were rounded, times a scale, ``[..., K]``."""
        return self._native.rows_int8(ids, self._weights, self._scales, (self.out_features, self.in_features), scale)


class BlockedLinear(FusedLinear):
    """float32 weights in oneDNN's blocks.

    Args:
        layers: What it stands for.
    """

    ROWS_HINT = 32

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__(layers)
        weights = _weights_of(layers)
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        self._weights = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS_HINT)  # noqa: SLF001 - as torch.compile
        self._bytes = weight.nbytes

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights."""
        return self._bytes + (0 if self._bias is None else self._bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., N]`` from float32 ``[..., K]``."""
        product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - calls it
        out: torch.Tensor = product(x, self._weights, self._bias, "none", [], "")
        return out


class RowsEmbedding(nn.Module):
    """Embeddings that share the weights of a packed output projection, as they did before it was packed.

    Args:
        head: The output projection.
        scale: Of the embeddings.

    Attributes:
        scale: As given.
    """

    def __init__(self, head: PackedLinear | Int8Linear, scale: float) -> None:
        super().__init__()
        # In a tuple, for a module that is an attribute would be a part of this one as well.
        self._head = (head,)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[..., K]`` from int64 ids ``[...]``."""
        return self._head[0].rows(input_ids, self.scale)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 weights ``[N, K]`` and the scale of each output, float32 ``[N]``: symmetric, to nearest. Pure."""
    rounded, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    # A few rows at a time: what lies between stays in the processor's caches.
    num_rows = max(1, AT_ONCE // weight.shape[1])
    parts = (torch.split(tensor, num_rows) for tensor in (weight.detach(), rounded, scales))
    for part, into, scale in zip(*parts, strict=True):
        plain = part.float()
        torch.div(plain.abs().amax(1), 127, out=scale)
        into.copy_((plain / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_())
    return rounded, scales


def _weights_of(layers: list[nn.Linear]) -> list[torch.Tensor]:
    return [layer.weight.detach() for layer in layers]


def _side_by_side_biases(layers: list[nn.Linear]) -> torch.Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    none = [torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float() for layer in layers]
    return torch.cat(none)
