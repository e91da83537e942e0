"""The attention function that transformers' modules call in a forward of a Gaudi, and the cache that each of them has.

As ``trencadis_torch.attention.adapter``, but for one thing: a module has its layer of the cache itself, and hands it to the pass, instead
of a number by which the pass would find it. torch.compile makes one graph for all layers of a kind then.
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
            layer: Of the module.
            query: ``[T, H, D]``.
            keys: ``[T, KV, D]``.
            values: ``[T, KV, Dv]``.
            options: Of the layer.
        """
        ...


def register() -> None:
    """Make the attention function known to transformers; may be called often."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLAT, flat_attention_of_layer)


def attach(model: Any, cache: FlatKVCache) -> None:
    """Give each attention module of a model its layer of a cache; of two caches it has the later one."""
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
    """Return attention outputs ``[1, T, H, Dv]``, and None for the weights; signature as transformers calls it.

    Args:
        module: The attention module, with its layer attached.
        query: ``[1, H, T, D]``.
        key: ``[1, KV, T, D]``.
        value: ``[1, KV, T, Dv]``.
        attention_mask: None.
        trencadis_pass: From the arguments of ``forward``.
        arguments: Of the module; some are :class:`AttentionOptions`.
    """
    output = trencadis_pass.attend(
        module.trencadis_layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options=AttentionOptions.of(arguments),
    )
    # A token's heads one after the other in memory, as transformers' own functions have them: some models take views of that.
    return torch.unflatten(output.flatten(1), 1, output.shape[1:]).unsqueeze(0), None
