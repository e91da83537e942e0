"""Modules of transformers that captured graphs cannot contain: changed if there is a static equivalent, else refused.

| what a module does | where | here |
|---|---|---|
| compares positions with the length the model was trained on, and chooses other frequencies beyond | rotary embeddings of types ``dynamic`` and ``longrope`` | never: no text is longer (``ModelFacts.max_model_len``) |
| makes its frequencies on the host in each forward | ``PhimoeRotaryEmbedding`` | they are made once |
| writes both parts of a key through views | ``expand_kv`` of multi-head latent attention | the parts are joined |
| looks for padding among the token ids, on the host, to warn of it | GPT-2 and others, if they have a padding token | never: padding is masked |
| has complex numbers; writes through a view | see ``_REFUSED`` and ``_REFUSED_IN_GRAPHS`` | refused |

Source: transformers 5.24, modeling_rope_utils.py, modeling_utils.py and models/{phimoe,deepseek_v3}; limits of a graph: the vendor's
documentation of HPU graphs, bridge 1.19 backend/helpers/tensor_utils.cpp for complex types.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from trencadis.errors import ModelLoadError

__all__ = ["make_static"]

_REFUSED = {"DeepseekV2RotaryEmbedding": "has complex numbers, which a Gaudi does not have"}
_REFUSED_IN_GRAPHS = {"Gemma3nTextAltUp": "writes through a view, which no graph of a Gaudi may"}


def make_static(model: Any, *, in_graphs: bool) -> None:
    """Change the modules of a model so that graphs can hold them.

    Args:
        model: Model of transformers on the CPU.
        in_graphs: Whether its forward is captured or compiled.

    Raises:
        ModelLoadError: A module has no static equivalent.
    """
    refused = _REFUSED | _REFUSED_IN_GRAPHS if in_graphs else _REFUSED
    for module in model.modules():
        kind = type(module)
        if why := refused.get(kind.__name__):
            raise ModelLoadError(
                f"{type(model).__name__}: {kind.__name__} {why}.", hint='Set [backend] name = "torch".'
            )
        if kind.__name__ == "PhimoeRotaryEmbedding":
            module.forward = MethodType(_phimoe_angles, module)
        elif hasattr(module, "rope_type") and (plain := getattr(kind.forward, "__wrapped__", None)) is not None:
            module.forward = MethodType(plain, module)
        if hasattr(module, "expand_kv"):
            module.expand_kv = MethodType(_expand_kv, module)
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _no_warning


def _phimoe_angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines ``[1, T, D]`` in the type of ``x``."""
    rope = self.config.rope_parameters
    scale = 1.0 if rope["rope_type"] == "default" else rope["short_mscale"]
    angles = position_ids[..., None].float() * self.inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def _expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[1, H, T, D]`` from latents ``[1, 1, T, R]`` and the rotary part of the keys."""
    widths = [self.qk_nope_head_dim, self.v_head_dim]
    expanded = torch.unflatten(self.kv_b_proj(kv_nope)[:, 0], -1, (-1, sum(widths))).transpose(1, 2)
    k_nope, values = torch.split(expanded, widths, dim=-1)
    return torch.cat([k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)], dim=-1), values


def _no_warning(input_ids: Any, attention_mask: Any) -> None:
    """Do nothing in place of a warning."""
