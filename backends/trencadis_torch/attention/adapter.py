"""The attention adapter for transformers: attention functions that hand a layer's tensors to the pass that the forward was given.

transformers passes keyword arguments of ``forward`` down to the attention function, so a pass travels with its forward and
nothing is kept between steps. An implementation without a mask function gets no mask: the pass knows what a query sees.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from trencadis_torch.attention.options import AttentionOptions

__all__ = ["AttentionPass", "PAGED", "PASS_ARGUMENT", "paged_attention", "register", "switch"]

PAGED = "trencadis_paged"
"""Name of the attention implementation."""

PASS_ARGUMENT = "trencadis_pass"
"""Keyword argument of ``forward`` that carries the pass."""


class AttentionPass(Protocol):
    """The interface that every attention layer of a model calls during a pass."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[T, H, Dv]``."""
        ...


def register() -> None:
    """Make the attention function known to transformers; may be called often."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention)


def switch(model: Any, implementation: str) -> bool:
    """Make a model use an attention implementation; False if it does not let itself be switched."""
    model.set_attn_implementation(implementation)
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    return all(getattr(config, "_attn_implementation", implementation) == implementation for config in configs.values())


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trencadis_pass: AttentionPass,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention outputs ``[1, T, H, Dv]``, and None for the weights; signature as transformers calls it.

    Args:
        module: The attention module; its ``layer_idx`` names the layer.
        query: ``[1, H, T, D]``.
        key: ``[1, KV, T, D]``.
        value: ``[1, KV, T, Dv]``.
        attention_mask: None.
        trencadis_pass: From the arguments of ``forward``.
        arguments: Other arguments of the module; some are :class:`AttentionOptions`.
    """
    output = trencadis_pass.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options=AttentionOptions.of(arguments),
    )
    return output.unsqueeze(0), None
