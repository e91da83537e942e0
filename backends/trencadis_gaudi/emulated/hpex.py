"""Emulated ``habana_frameworks.torch.hpex`` and operators of ``torch.ops.hpu``, each of which is one operation of the device.

Signatures are the vendor's (bridge 1.19); ``fused.meanings`` computes the results.
"""

from __future__ import annotations

import enum
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa
from trencadis_gaudi.emulated.device import EmulatedDeviceError
from trencadis_gaudi.fused import meanings

__all__ = ["emulated_hpex"]

_OPERATORS = {
    "rms_norm": "(Tensor data_in, Tensor gamma, float epsilon) -> (Tensor, Tensor)",
    "rotary_pos_embedding": (
        "(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode) -> Tensor"
    ),
    "mixture_of_experts.fused_weights": (
        "(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, "
        "bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor"
    ),
}
"""Schemas. Source: gaudi-pytorch-bridge 1.19.0, scripts/hpu_op.yaml and habana_eager/eager_custom_op_register.cpp."""


class RotaryPosEmbeddingMode(enum.Enum):
    """Pairing of elements that are rotated together."""

    BLOCKWISE = 0
    PAIRWISE = 1


class FusedRMSNorm(torch.autograd.Function):
    """RMS norm; inference only."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004 - the vendor's signature
        data_in: torch.Tensor,
        gamma: torch.Tensor,
        eps: float,
        use_stages: bool = True,  # noqa: ARG004
        bwd_mode: int = 0,  # noqa: ARG004
        fast_math: bool = False,
    ) -> torch.Tensor:
        """Return the norm of the last dimension.

        Raises:
            EmulatedDeviceError: ``fast_math``, which the backend does not use.
        """
        if fast_math:
            raise EmulatedDeviceError("the emulated FusedRMSNorm knows no fast_math.")
        norm: torch.Tensor = torch.ops.hpu.rms_norm(data_in, gamma, eps)[0]
        return norm


def apply_rotary_pos_emb(p: torch.Tensor, *args: Any) -> torch.Tensor:
    """Return a rotary embedding.

    Args:
        p: Tensor to rotate, ``[T, B, H, R]``.
        args: Cosines, sines, position ids, an offset, and a :class:`RotaryPosEmbeddingMode`.
    """
    cos, sin, position_ids, offset, mode = args
    types = (p.dtype, cos.dtype, sin.dtype)
    dtype = torch.float32 if torch.float32 in types else p.dtype
    p, cos, sin = p.to(dtype), cos.to(dtype), sin.to(dtype)
    result: torch.Tensor = torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, mode.value)
    return result


def _rms_norm(data_in: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    norm = meanings.rms_norm(data_in, gamma, epsilon)
    return norm, torch.rsqrt(data_in.float().square().mean(-1, keepdim=True) + epsilon).to(norm.dtype)


def _rotary_pos_embedding(
    input: torch.Tensor,  # noqa: A002 - the vendor's name
    sin: torch.Tensor,
    cos: torch.Tensor,
    position_ids: torch.Tensor | None,
    offset: int,
    mode: int,
) -> torch.Tensor:
    if position_ids is not None or offset:
        raise EmulatedDeviceError("the emulated rotary_pos_embedding takes neither position_ids nor an offset.")
    if cos.shape[-1] != input.shape[-1] or sin.shape != cos.shape:
        raise EmulatedDeviceError(f"rotary_pos_embedding: tables {tuple(cos.shape)} for input {tuple(input.shape)}.")
    meaning = meanings.rotary_pairwise if mode == RotaryPosEmbeddingMode.PAIRWISE.value else meanings.rotary_blockwise
    return meaning(input, cos, sin)


_RESULTS = {
    "rms_norm": _rms_norm,
    "rotary_pos_embedding": _rotary_pos_embedding,
    "mixture_of_experts.fused_weights": meanings.mixture_of_experts,
}


@cache
def emulated_hpex() -> SimpleNamespace:
    """Register the operators; return an emulated ``habana_frameworks.torch.hpex``."""
    global _library  # noqa: PLW0603 - operators exist as long as the library object
    _library = torch.library.Library("hpu", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in _OPERATORS.items():
        _library.define(f"{name}{schema}")
        _library.impl(name, _RESULTS[name], "CompositeExplicitAutograd")
    return SimpleNamespace(
        kernels=SimpleNamespace(
            FusedSDPA=SimpleNamespace(apply=emulated_fused_sdpa),
            RotaryPosEmbeddingMode=RotaryPosEmbeddingMode,
            apply_rotary_pos_emb=apply_rotary_pos_emb,
        ),
        normalization=SimpleNamespace(FusedRMSNorm=FusedRMSNorm),
    )


_library: Any = None
