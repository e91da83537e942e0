"""Facts about arithmetic."""

from __future__ import annotations

import torch

from trencadis_gaudi.checks.bench import Bench, error_of, on_device
from trencadis_gaudi.checks.records import Found

__all__ = ["bfloat16", "doubles", "draws", "integers"]

_FACTORS = (2**20 + 1, 2**20 + 3)
_STEP = 2.0**-40
_LARGEST_ERROR = 0.01


@on_device
def integers(bench: Bench) -> Found:
    """Multiply integers whose product exceeds 32 bits."""
    first, second = (bench.to_device(torch.tensor([factor])) for factor in _FACTORS)
    product = int((first * second).cpu())
    wide = _FACTORS[0] * _FACTORS[1]
    narrow = wide & 0xFFFFFFFF
    kind = {wide: "64 bits", narrow: "the low 32 bits"}.get(product, "something else")
    return Found(product == (narrow if bench.habana.is_lazy else wide), f"{product}: {kind} of {wide}")


@on_device
def doubles(bench: Bench) -> Found:
    """Add numbers that float32 cannot represent; outside lazy mode both results pass.

    Source: gaudi-pytorch-bridge 1.19.0, ``backend/helpers/tensor_utils.cpp``, which casts float64 to float32 in every mode.
    """
    one = bench.to_device(torch.tensor([1.0], dtype=torch.float64))
    found = float((one + _STEP - 1.0).cpu())
    width = {0.0: "float32", _STEP: "float64"}.get(found, "neither float32 nor float64")
    is_right = found in ((0.0,) if bench.habana.is_lazy else (0.0, _STEP))
    return Found(is_right, f"(1 + 2**-40) - 1 is {found:g}: {width}")


@on_device
def bfloat16(bench: Bench) -> Found:
    """Multiply matrices."""
    maker = torch.Generator().manual_seed(1)
    first, second = (torch.randn(shape, generator=maker).bfloat16() for shape in ((128, 256), (256, 128)))
    found = (bench.to_device(first) @ bench.to_device(second)).cpu()
    error = error_of(found, first.float() @ second.float())
    return Found(error <= _LARGEST_ERROR, f"relative error {error:.2%}")


@on_device
def draws(bench: Bench) -> Found:
    """Sample tokens with random numbers of the host."""
    maker = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn((512, 1000), generator=maker)
    times = torch.rand((512, 1000), generator=maker, dtype=torch.float64).clamp(min=1e-30).log().neg().float()
    sent = bench.to_device(times)
    same_bits = torch.equal(sent.cpu(), times)
    found = (sent / bench.to_device(logits).softmax(-1)).argmin(-1).cpu()
    share = float((found == (times / logits.softmax(-1)).argmin(-1)).double().mean())
    text = f"{'the same' if same_bits else 'other'} bits, {share:.1%} of the CPU's tokens"
    return Found(same_bits and share >= 0.99, text)
