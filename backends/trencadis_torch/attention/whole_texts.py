"""Attention of texts that are computed whole: no KV cache, nothing padded.

The paged attention asks a pass for every layer's outputs; this pass answers from the layer's new keys and values alone.

Shapes: T tokens of all texts, H query heads, KV key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend
from trencadis_torch.cache.kv_cache import AttentionLayer

__all__ = ["WholeTexts"]

MAX_PIECE = 256
"""Queries of one piece of a text longer than the layer's window: bounds the mask, [queries, keys]."""


class WholeTexts:
    """Keeps texts apart; those of one length that follow each other are attended to in one call.

    Args:
        layers: The model's.
        lengths: Tokens of each text; they follow each other.
    """

    def __init__(self, layers: tuple[AttentionLayer, ...], lengths: Sequence[int]) -> None:
        self._windows = {layer.index: layer.window for layer in layers}
        self._runs: list[tuple[int, int, int]] = []
        first = 0
        for length in lengths:
            if self._runs and self._runs[-1][2] == length:
                start, count, _ = self._runs[-1]
                self._runs[-1] = (start, count + 1, length)
            else:
                self._runs.append((first, 1, length))
            first += length

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Return attention outputs ``[T, H, Dv]``; stores nothing.

        Args:
            layer_index: The module's ``layer_idx``.
            query: ``[T, H, D]``.
            keys: ``[T, KV, D]``.
            values: ``[T, KV, Dv]``.
            options: Options of the layer.
        """
        window = self._windows[layer_index]
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        for first, count, length in self._runs:
            tokens = slice(first, first + count * length)
            one, two, three = (
                torch.unflatten(part[tokens], 0, (count, length)).transpose(1, 2) for part in (query, keys, values)
            )
            target = torch.unflatten(output[tokens], 0, (count, length)).transpose(1, 2)
            for queries, seen, mask in _pieces(length, window, query.device):
                target[:, :, queries] = attend(
                    one[:, :, queries],
                    two[:, :, seen],
                    three[:, :, seen],
                    mask=mask,
                    options=options,
                )
        return output


def _pieces(length: int, window: int, device: torch.device) -> list[tuple[slice, slice, torch.Tensor | None]]:
    """Return which queries of a text see which keys, under which mask; None is causal. Pure."""
    if not window or length <= window:
        return [(slice(0, length), slice(0, length), None)]
    pieces: list[tuple[slice, slice, torch.Tensor | None]] = []
    for start in range(0, length, MAX_PIECE):
        end, first = min(start + MAX_PIECE, length), max(0, start - window + 1)
        queries = torch.arange(start, end, device=device)[:, None]
        keys = torch.arange(first, end, device=device)
        mask = (keys <= queries) & (keys > queries - window)
        pieces.append((slice(start, end), slice(first, end), mask[None, None]))
    return pieces
