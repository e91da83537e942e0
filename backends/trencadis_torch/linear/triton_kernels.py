"""Triton kernels for the operations of a decoder between its matrix products: norms, gates and rotations, one kernel each.

A product of one decode step reads gigabytes; what is between takes as many launches as the model's own code has operations, ten and
more for a norm or a rotation, each of which costs about two microseconds even as a part of a CUDA graph.

Numbers are computed with in float32 and rounded once, where transformers rounds after some of its operations.

Shapes: R rows, T tokens, H query heads, KV key-value heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from trencadis_torch.linear.heads import Heads, How

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of PyTorch for the CPU
    triton = tl = None

__all__ = ["TritonModules"]

_GATED = 1024
"""Elements of a gate that one program computes."""


_ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.silu,
    functools.partial(functional.gelu, approximate="tanh"),
    functional.gelu,
    lambda x: functional.relu(x).square(),
    functional.relu,
)
"""By their numbers in ``ACTIVATIONS``."""


def _kernel(function: Callable[..., None]) -> Any:
    return function if triton is None else triton.jit(function)


@_kernel
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Norm a row."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    places = tl.arange(0, PAD)
    is_real = places < SIZE
    row = tl.load(x + first + places, mask=is_real, other=0.0).to(tl.float32)
    factors = tl.load(weight + places, mask=is_real, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / SIZE + eps)
    tl.store(out + first + places, (row * scale * factors).to(out.dtype.element_ty), mask=is_real)


@_kernel
def gate_kernel(x, out, SIZE: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Multiply some values of a row with their activated gates."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_real = places < SIZE
    gates = tl.load(x + row * 2 * SIZE + places, mask=is_real, other=0.0).to(tl.float32)
    values = tl.load(x + row * 2 * SIZE + SIZE + places, mask=is_real, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = gates / (1.0 + tl.exp(tl.minimum(-gates, 80.0)))
    elif ACTIVATION == 2:
        active = 0.5 * gates * (1.0 + tl.erf(gates * 0.70710678118654752))
    elif ACTIVATION == 3:
        active = tl.maximum(gates, 0.0) * tl.maximum(gates, 0.0)
    elif ACTIVATION == 4:
        active = tl.maximum(gates, 0.0)
    else:
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)); beyond 40 it is 0 or 1.
        inner = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
        active = gates / (1.0 + tl.exp(tl.minimum(-inner, 80.0)))
    tl.store(out + row * SIZE + places, (active * values).to(out.dtype.element_ty), mask=is_real)


@_kernel
def rotate_kernel(  # type: ignore[no-untyped-def]
    x,  # [T, (H + 2 KV) D]
    query_weight,  # [D], if there are norms
    key_weight,
    cosines,  # [T, R]
    sines,
    eps,
    HEADS: tl.constexpr,  # noqa: N803 - as constants are written in Triton
    STRIDE: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    ROTATED: tl.constexpr,  # noqa: N803
    PAD: tl.constexpr,  # noqa: N803
    HALF_PAD: tl.constexpr,  # noqa: N803
    HAS_NORMS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
):
    """Norm and turn one head in place.

    By one warp: its lanes have all read when the sum is known, and what a lane writes it has read itself.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = x + token * STRIDE + head * DIM
    half: tl.constexpr = ROTATED // 2
    places = tl.arange(0, HALF_PAD)
    is_real = places < half
    first = 2 * places if PAIRS else places
    second = first + 1 if PAIRS else first + half
    left = tl.load(start + first, mask=is_real, other=0.0).to(tl.float32)
    right = tl.load(start + second, mask=is_real, other=0.0).to(tl.float32)
    if HAS_NORMS:
        weight = query_weight if head < HEADS else key_weight
        every = tl.arange(0, PAD)
        whole = tl.load(start + every, mask=every < DIM, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / DIM + eps)
        left *= scale * tl.load(weight + first, mask=is_real, other=0.0).to(tl.float32)
        right *= scale * tl.load(weight + second, mask=is_real, other=0.0).to(tl.float32)
        if ROTATED < DIM:
            is_rest = (every >= ROTATED) & (every < DIM)
            factors = tl.load(weight + every, mask=is_rest, other=0.0).to(tl.float32)
            tl.store(start + every, (whole * scale * factors).to(x.dtype.element_ty), mask=is_rest)
    angles = token * ROTATED + places
    first_cos = tl.load(cosines + angles, mask=is_real, other=0.0).to(tl.float32)
    first_sin = tl.load(sines + angles, mask=is_real, other=0.0).to(tl.float32)
    second_cos = tl.load(cosines + angles + half, mask=is_real, other=0.0).to(tl.float32)
    second_sin = tl.load(sines + angles + half, mask=is_real, other=0.0).to(tl.float32)
    tl.store(start + first, (left * first_cos - right * first_sin).to(x.dtype.element_ty), mask=is_real)
    tl.store(start + second, (right * second_cos + left * second_sin).to(x.dtype.element_ty), mask=is_real)


class TritonModules:
    """The kernels, called as :class:`~trencadis_torch.linear.fused.FusedKernels`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x / sqrt(mean(x²) + eps) * weight``, over the last axis."""
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        pad = _power(size)
        warps = max(1, min(16, pad // 512))
        rms_norm_kernel[(x.numel() // size,)](x, weight, out, eps, SIZE=size, PAD=pad, num_warps=warps)
        return out

    def gate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Return ``activation(gates) * values`` from both side by side, ``[..., 2 N]`` to ``[..., N]``."""
        x, size = x.contiguous(), x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], size)
        grid = (x.numel() // (2 * size), -(-size // _GATED))
        gate_kernel[grid](x, out, SIZE=size, WIDTH=_GATED, ACTIVATION=activation)
        return out

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Return the norm by mean and variance: PyTorch's own kernel, which is one."""
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)

    def activate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Return ``activation(x)``, by PyTorch's own kernels."""
        return _ACTIVATIONS[activation](x)

    def rotate(self, x: torch.Tensor, heads: Heads, angles: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Norm and turn heads in place; see :meth:`FusedKernels.rotate`."""
        is_normed = heads.query_norm is not None and heads.key_norm is not None
        if is_normed and How.NORMS_WHOLE in heads.how:
            self._norm_parts(x, heads, whole=True)
        within = is_normed and angles is not None and not heads.how & (How.NORMS_AFTER | How.NORMS_WHOLE)
        if angles is not None:
            rotated = angles[0].shape[-1]
            rotate_kernel[(x.numel() // x.shape[-1], heads.num_heads + heads.num_kv_heads)](
                *(x, heads.query_norm if within else x, heads.key_norm if within else x),
                *(angles[0].contiguous(), angles[1].contiguous(), heads.eps),
                HEADS=heads.num_heads,
                STRIDE=x.shape[-1],
                DIM=heads.head_dim,
                ROTATED=rotated,
                PAD=_power(heads.head_dim),
                HALF_PAD=_power(rotated // 2),
                HAS_NORMS=within,
                PAIRS=How.PAIRS in heads.how,
                num_warps=1,
            )
        if is_normed and not within and How.NORMS_WHOLE not in heads.how:
            self._norm_parts(x, heads, whole=False)

    def _norm_parts(self, x: torch.Tensor, heads: Heads, *, whole: bool) -> None:
        sizes = [heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim]
        for norm, part in zip(
            (heads.query_norm, heads.key_norm), torch.split(x[..., : sum(sizes)], sizes, -1), strict=True
        ):
            assert norm is not None, "both are there or none"
            rows = part if whole else part.view(*part.shape[:-1], -1, heads.head_dim)
            rows.copy_(self.rms_norm(rows, norm, heads.eps))


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
