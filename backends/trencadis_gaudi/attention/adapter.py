"""The attention function that transformers' modules call on a Gaudi, and the cache layer of each module.

Like ``trencadis_torch.attention.adapter``, except that a module holds its layer of the cache and hands it to the pass, instead
of a layer index. So torch.compile makes one graph for all layers of a kind.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from trencadis_gaudi.flat_cache import FlatKVCache, FlatLayer
from trencadis_torch.attention.options import AttentionOptions

__all__ = ["FLAT", "LayerPass", "attach", "flat_attention_of_layer", "register"]

FLAT = "trencadis_flat"
"""Name of the attention implementation."""

_LAYER = "trencadis_layer"


class LayerPass(Protocol):
    """The interface that every attention layer of a model calls during a pass of a Gaudi."""

    def attend(
        self,
        layer: FlatLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[T, H, Dv]``.

        Args:
            layer: Cache layer of the module.
            query: New queries, ``[T, H, D]``.
            keys: New keys, ``[T, KV, D]``.
            values: New values, ``[T, KV, Dv]``.
            options: Attention options of the layer.
        """
        ...


def register() -> None:
    """Register the attention function with transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLAT, flat_attention_of_layer)


def attach(model: Any, cache: FlatKVCache) -> None:
    """Attach its layer of a cache to each attention module of a model, replacing an earlier one."""
    layers = {layer.index: cache.flat_layer(layer.index) for layer in cache.layers}
    for module in model.modules():
        if (index := getattr(module, "layer_idx", None)) in layers:
            setattr(module, _LAYER, layers[index])


def flat_attention_of_layer(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trencadis_pass: LayerPass,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention outputs ``[1, T, H, Dv]``, and None for the weights; transformers defines the signature.

    Args:
        module: Attention module with its cache layer attached.
        query: New queries, ``[1, H, T, D]``.
        key: New keys, ``[1, KV, T, D]``.
        value: New values, ``[1, KV, T, Dv]``.
        attention_mask: Always None; the pass masks.
        trencadis_pass: Pass, from the arguments of ``forward``.
        arguments: Arguments of the module; some are :class:`AttentionOptions`.
    """
    output = trencadis_pass.attend(
        module.trencadis_layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options=AttentionOptions.of(arguments),
    )
    # The heads of a token are contiguous, as in transformers' own functions, since some models take views of the result.
    return torch.unflatten(output.flatten(1), 1, output.shape[1:]).unsqueeze(0), None
