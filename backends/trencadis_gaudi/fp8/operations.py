"""Operations of ``torch.ops.hpu`` for fp8; the emulated device has functions of the same names.

Source: gaudi-pytorch-bridge 1.19.0, habana_eager/eager_custom_op_register.cpp (signatures), hpu_ops/backend/fp8_ops.cpp (types) and
tests/pytest_working/any_mode/test_hpu_fp8_ops_any_mode.py (meaning); vllm-gaudi 091bbadd, extension/ops.py, apply_fp8_linear_hpu
(shapes: a scale for each token is ``[T, 1]``, for each output ``[N]``).
"""

from __future__ import annotations

import torch

from trencadis_gaudi.fp8.scales import FP8

__all__ = ["NAMES", "fp8_product", "from_fp8", "to_fp8"]

NAMES = ("cast_to_fp8_v2", "cast_from_fp8", "fp8_gemm_v2")


def to_fp8(values: torch.Tensor, inverse_scale: torch.Tensor) -> torch.Tensor:
    """Return ``values × inverse_scale`` in fp8, rounded to the nearest and saturated to the range."""
    rounded: torch.Tensor = torch.ops.hpu.cast_to_fp8_v2(values, inverse_scale, False, False, FP8)[0]
    return rounded


def from_fp8(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``stored × scale`` in another type."""
    values: torch.Tensor = torch.ops.hpu.cast_from_fp8(stored, scale, dtype)
    return values


def fp8_product(
    values: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``values · weightᵀ × scale × weight_scale``, ``[T, N]``, summed in float32.

    Args:
        values: Activations, fp8 ``[T, K]``.
        weight: Weight, fp8 ``[N, K]``.
        scale: Scale of the values, one element or ``[T, 1]``.
        weight_scale: Scale of the weight, ``[N]`` or ``[1]``.
        dtype: Number type of the result.
    """
    product: torch.Tensor = torch.ops.hpu.fp8_gemm_v2(
        values, False, weight, True, None, dtype, scale, weight_scale, None, False
    )
    return product
