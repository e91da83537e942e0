"""Facts about the vendor's kernels and about the KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from trencadis_gaudi.attention.fused_sdpa import fused_attention
from trencadis_gaudi.block_swaps import BlockSwaps
from trencadis_gaudi.checks.bench import Bench, error_of, on_device
from trencadis_gaudi.checks.records import Found
from trencadis_gaudi.experts import dense_experts, kernel_experts
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.fp8.linear import DynamicLinear
from trencadis_gaudi.fused.meanings import rms_norm, rotary_blockwise, rotary_pairwise
from trencadis_gaudi.kernels import Mode
from trencadis_torch.cache.kv_cache import AttentionLayer

__all__ = ["cache", "experts", "fp8", "fused_sdpa", "norm", "rotary", "swaps"]

_LARGEST_DIFFERENCE = 0.03
"""Largest difference of an attention output in bfloat16, with normally distributed values."""
_LARGEST_ERROR = 0.02
_LARGEST_FP8_ERROR = 0.1
"""Weights and inputs are rounded to four significant bits each: 4 % was measured on the emulated device."""
_SIZE = 16
_NUM_BLOCKS = 12


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@on_device
def fused_sdpa(bench: Bench) -> Found:
    """Run the attention kernel in both ways that prefills use."""
    kernel = bench.habana.kernels.attention
    if not bench.config.fused_sdpa:
        return Found(None, "not tested: backend.gaudi.fused_sdpa is false")
    if kernel is None:
        return Found(False, "there is no such kernel")
    query, keys, values = _random(2, 8, 128, 64, seed=1), _random(2, 2, 128, 64, seed=2), _random(2, 2, 128, 64, seed=3)
    lengths = torch.tensor([128, 77])
    causal = torch.ones(128, 128, dtype=torch.bool).tril()
    window = causal & ~causal.tril(-32)
    moved = [bench.to_device(part) for part in (query, keys, values)]
    differences = []
    for mask, query_lens in ((None, lengths), (window.expand(2, 1, 128, 128), None)):
        found = fused_attention(
            kernel,
            *moved,
            mask=None if mask is None else bench.to_device(mask.contiguous()),
            query_lens=None if query_lens is None else bench.to_device(query_lens),
            scale=None,
        ).cpu()
        wide_keys, wide_values = (part.float().repeat_interleave(4, dim=1) for part in (keys, values))
        seen = causal if mask is None else mask
        expected = scaled_dot_product_attention(query.float(), wide_keys, wide_values, seen)
        real = torch.arange(128) < (lengths if query_lens is not None else torch.tensor([128, 128]))[:, None]
        differences.append(float(((found.float() - expected) * real[:, None, :, None]).abs().max()))
    text = f"largest difference {differences[0]:.4f} causal, {differences[1]:.4f} with a mask"
    return Found(all(difference <= _LARGEST_DIFFERENCE for difference in differences), text)  # false for NaN


@on_device
def experts(bench: Bench) -> Found:
    """Run experts with the vendor's kernel."""
    kernel = bench.habana.kernels.experts
    if kernel is None:
        return _absent(bench)
    module = _Experts(_random(8, 192, 64, seed=4) / 8, _random(8, 64, 96, seed=5) / 8)
    hidden = _random(64, 64, seed=6)
    weights, chosen = _random(64, 8, seed=7).float().softmax(-1).topk(2)
    on_host = _Experts(module.gate_up_proj.float(), module.down_proj.float())
    expected = dense_experts(on_host, hidden.float(), chosen, weights)
    moved = _Experts(bench.to_device(module.gate_up_proj), bench.to_device(module.down_proj))
    found = kernel_experts(kernel)(moved, *(bench.to_device(part) for part in (hidden, chosen, weights)))
    error = error_of(found, expected)
    return Found(error <= _LARGEST_ERROR, f"relative error {error:.2%}")


@on_device
def norm(bench: Bench) -> Found:
    """Run the norm kernel with weights of the input's type and of float32."""
    kernel = bench.habana.kernels.norm
    if kernel is None:
        return _absent(bench)
    hidden, weight = _random(1, 16, 256, seed=12) * 3, _random(256, seed=13)
    errors = []
    for gamma in (weight, weight.float()):
        found = kernel(bench.to_device(hidden), bench.to_device(gamma), 1e-5)
        errors.append(error_of(found, rms_norm(hidden, gamma, 1e-5)))
    return Found(max(errors) <= _LARGEST_ERROR, f"relative error {errors[0]:.2%}, {errors[1]:.2%} with a wide weight")


@on_device
def rotary(bench: Bench) -> Found:
    """Run the rotary kernel in both modes."""
    kernels = bench.habana.kernels.rotary
    if kernels is None:
        return _absent(bench)
    heads, angles = _random(16, 1, 4, 64, seed=14), _random(16, 1, 1, 32, seed=15).float()
    blockwise, pairwise = torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1)
    tried: list[tuple[Mode, Any, torch.Tensor]] = [
        ("BLOCKWISE", rotary_blockwise, blockwise),
        ("PAIRWISE", rotary_pairwise, pairwise),
    ]
    errors = []
    for mode, meaning, wide in tried:
        cos, sin = wide.cos().bfloat16(), wide.sin().bfloat16()
        found = kernels[mode](*map(bench.to_device, (heads, cos, sin)))
        errors.append(error_of(found, meaning(heads, cos, sin)))
    return Found(max(errors) <= _LARGEST_ERROR, f"relative error {errors[0]:.2%} blockwise, {errors[1]:.2%} pairwise")


def _absent(bench: Bench) -> Found:
    if not bench.config.fused_kernels:
        return Found(None, "not tested: backend.gaudi.fused_kernels is false")
    return Found(None, "not tested: this release has no such kernel; plain operations stand for it")


def fp8(bench: Bench) -> Found:
    """Run a linear layer in fp8."""
    device = bench.habana.fp8
    if device is None:
        return Found(None, 'not tested: backend.gaudi.fp8 = "off"; --backend.gaudi.fp8 dynamic tests it')
    linear, hidden = _linear(), _random(32, 128, seed=18)
    expected = linear(hidden).detach()
    layer = DynamicLinear(linear, device, bench.habana.config.scale_method).to(bench.habana.device)
    with bench.habana.active(), torch.inference_mode():
        error = error_of(layer(bench.to_device(hidden)), expected)
    return Found(
        error <= _LARGEST_FP8_ERROR, f"relative error {error:.2%}; {device.name}, largest number {device.largest:g}"
    )


@torch.no_grad()
def _linear() -> torch.nn.Linear:
    linear = torch.nn.Linear(128, 96, dtype=torch.bfloat16)
    linear.weight.copy_(_random(96, 128, seed=16) / 8)
    linear.bias.copy_(_random(96, seed=17))
    return linear


class _Experts:
    """Experts in the form of transformers."""

    has_gate = is_concatenated = True
    has_bias = is_transposed = False
    config = SimpleNamespace(hidden_act="silu")

    def __init__(self, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> None:
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up

    _apply_gate.__name__ = "_default_apply_gate"


def _cache(bench: Bench) -> FlatKVCache:
    every = tuple(
        AttentionLayer(index=index, num_kv_heads=2, key_dim=32, value_dim=32, window=0, dtype=torch.bfloat16)
        for index in range(2)
    )
    return FlatKVCache(every, num_blocks=_NUM_BLOCKS, block_size=_SIZE, device=bench.habana.device)


@on_device
def cache(bench: Bench) -> Found:
    """Write to the cache, and gather from it."""
    made, host = _cache(bench), torch.zeros((_NUM_BLOCKS + 1) * _SIZE, 2, 32).bfloat16()
    slots = torch.randperm(_NUM_BLOCKS * _SIZE, generator=torch.Generator().manual_seed(8))[:70]
    keys, values = _random(70, 2, 32, seed=9), _random(70, 2, 32, seed=10)
    made.write(1, *(bench.to_device(part) for part in (slots, keys, values)))
    bench.flush()
    blocks = torch.tensor([5, 0, 11, 7])
    found = [part.cpu() for part in made.gather(bench.to_device(blocks))]
    num_wrong = 0
    for part, written in zip(found, (None, keys, None, values), strict=True):
        expected = host.clone() if written is None else host.index_copy(0, slots, written)
        num_wrong += int((part != torch.unflatten(expected, 0, (-1, _SIZE))[blocks]).sum())
    return Found(not num_wrong, f"{num_wrong} of {sum(part.numel() for part in found)} elements are wrong")


@on_device
def swaps(bench: Bench) -> Found:
    """Swap two blocks of the cache."""
    made = _cache(bench)
    content = _random((_NUM_BLOCKS + 1) * _SIZE, 2, 32, seed=11)
    slots = bench.to_device(torch.arange(len(content)))
    for layer in range(2):
        made.write(layer, slots, *[bench.to_device(content)] * 2)
    bench.flush()
    BlockSwaps(made, bench.config, bench.habana).copy(np.array([2, 9], np.int32), np.array([9, 2], np.int32))
    order = list(range(_NUM_BLOCKS + 1))
    order[2], order[9] = 9, 2
    expected = torch.unflatten(content, 0, (-1, _SIZE))[order]
    found = [part.cpu() for part in made.gather(bench.to_device(torch.arange(_NUM_BLOCKS + 1)))]
    num_wrong = sum(int((part != expected).flatten(1).any(1).sum()) for part in found)
    return Found(not num_wrong, f"{num_wrong} of {len(found) * len(order)} blocks are wrong")
