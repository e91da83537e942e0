"""Reference functions, on the CPU, of the fp8 operations of ``torch.ops.hpu`` on a Gaudi 2, for the emulated device and torch.compile.

Source: that of ``fp8/operations.py``. The bridge's tests scale in the type of the input, round to the nearest, and saturate.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from trencadis_gaudi.emulated.device import EmulatedDeviceError
from trencadis_gaudi.fp8.scales import FP8, GAUDI2

__all__ = ["copy_by_index", "register_operations"]

_SCHEMAS = (
    "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, bool is_amax=False, ScalarType dtype=None, "
    "int[]? scale_shape=None) -> (Tensor, Tensor)",
    "cast_from_fp8(Tensor input, Tensor? scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor",
    "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, Tensor? A_scale_inv=None, "
    "Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor",
)
"""Schemas. Source: bridge 1.19, habana_eager/eager_custom_op_register.cpp."""

_WIDE = (torch.float32, torch.bfloat16)


@cache
def register_operations() -> Any:
    """Register the operations with PyTorch, once per process; return the library that keeps them registered."""
    library = torch.library.Library("hpu", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, function in zip(_SCHEMAS, (_cast_to_fp8, _cast_from_fp8, _gemm), strict=True):
        name = library.define(schema)  # type: ignore[no-untyped-call]
        # The same functions compute shapes of results.
        for key in ("CPU", "Meta"):
            library.impl(name, function, key)  # type: ignore[no-untyped-call]
    return library


def copy_by_index(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Run ``index_copy_`` on the CPU; fp8 is copied as bytes, since PyTorch does not support it."""
    if target.dtype == source.dtype == FP8:
        target.view(torch.uint8).index_copy_(dim, index, source.view(torch.uint8))
        return target
    return target.index_copy_(dim, index, source)


def _cast_to_fp8(
    values: torch.Tensor,
    scale: torch.Tensor | None = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if stochastic_rounding or scale_shape is not None or dtype is not FP8:
        raise EmulatedDeviceError(
            "the emulated cast_to_fp8_v2 rounds to the nearest float8_e4m3fn, and shapes no scale."
        )
    if values.dtype not in _WIDE:
        raise EmulatedDeviceError(f"cast_to_fp8_v2 takes float32 or bfloat16, not {values.dtype}.")
    scaled = values if scale is None else values * scale.to(values.dtype)
    amax = values.abs().amax().float() if is_amax else values.new_empty(0, dtype=torch.float32)
    return scaled.clamp(-GAUDI2.largest, GAUDI2.largest).to(dtype), amax


def _cast_from_fp8(
    stored: torch.Tensor, scale: torch.Tensor | None, out_dtype: torch.dtype, scale_shape: list[int] | None = None
) -> torch.Tensor:
    if stored.dtype is not FP8 or out_dtype not in _WIDE or scale_shape is not None:
        raise EmulatedDeviceError(
            f"cast_from_fp8 yields float32 or bfloat16 of float8_e4m3fn, not {out_dtype} of {stored.dtype}."
        )
    values = stored.to(out_dtype)
    return values if scale is None else values * scale.to(out_dtype)


def _gemm(
    a: torch.Tensor,
    trans_a: bool,
    b: torch.Tensor,
    trans_b: bool,
    d: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_scale_inv: torch.Tensor | None = None,
    b_scale_inv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    b_scale_shape: list[int] | None = None,
) -> torch.Tensor:
    if a.dtype is not FP8 or b.dtype is not FP8 or out_dtype not in _WIDE or accumulate or b_scale_shape is not None:
        raise EmulatedDeviceError(
            "the emulated fp8_gemm_v2 multiplies float8_e4m3fn to float32 or bfloat16, and accumulates nothing."
        )
    left, right = (part.float().mT if flipped else part.float() for part, flipped in ((a, trans_a), (b, trans_b)))
    product = left @ right
    for scale in (a_scale_inv, b_scale_inv):
        if scale is not None:
            product = product * scale.float()
    return (product if bias is None else product + bias.float()).to(out_dtype)
