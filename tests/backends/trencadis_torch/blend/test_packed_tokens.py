"""Tokens without their positions, as bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_torch.blend.packed_tokens import PackedTokens
from trencadis_torch.blend.reposition import Angles, Pairs, rotate
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache


def made(dtype, value_dim=6):
    layers = tuple(
        AttentionLayer(index=i, num_kv_heads=2, key_dim=8, value_dim=value_dim, window=0, dtype=dtype) for i in range(2)
    )
    cache = PagedKVCache(layers, num_blocks=8, block_size=4, device=torch.device("cpu"))
    return cache, PackedTokens(layers, (Pairs.HALVES, Pairs.NONE), block_size=4)


def angles(first, count):
    turns = torch.arange(first, first + count)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    return Angles(turns.repeat(1, 2).cos(), turns.repeat(1, 2).sin())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_packed_comes_back_turned_as_it_was(dtype):
    """Keys in float32, so that turning them back and forth costs no more than its rounding; values bit for bit."""
    cache, packed = made(dtype)
    for part in cache.parts:
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    blocks = np.empty((3, cache.layout.block_bytes), np.uint8)
    cache.read_blocks([5, 0, 3], blocks)
    tokens = packed.pack(blocks, skip=3, num_tokens=7, angles=angles(40, 7))
    assert tokens.shape == (7, packed.token_bytes)
    slots = (torch.tensor([5, 0, 3])[:, None] * 4 + torch.arange(4)).flatten()[3:10]
    for place, pairs in enumerate((Pairs.HALVES, Pairs.NONE)):
        keys = rotate(packed.keys(tokens, place), angles(40, 7), pairs)
        original = cache.keys[place].flatten(0, 1)[slots].float()
        torch.testing.assert_close(keys, original, atol=1e-6, rtol=1e-6)
        assert torch.equal(packed.values(tokens, place), cache.values[place].flatten(0, 1)[slots])


def test_a_part_of_the_tokens_is_a_part_of_the_bytes():
    cache, packed = made(torch.float32)
    for part in cache.parts:
        part.copy_(torch.randn(part.shape))
    blocks = np.empty((2, cache.layout.block_bytes), np.uint8)
    cache.read_blocks([1, 2], blocks)
    whole = packed.pack(blocks, skip=0, num_tokens=8, angles=angles(0, 8))
    assert (whole[3:6] == packed.pack(blocks, skip=3, num_tokens=3, angles=angles(3, 3))).all()


def test_bytes_of_a_token_are_keys_in_float32_and_values_as_they_are():
    _, packed = made(torch.bfloat16)
    assert packed.token_bytes == 2 * 2 * 8 * 4 + 2 * 2 * 6 * 2
