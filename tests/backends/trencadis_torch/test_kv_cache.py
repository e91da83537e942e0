from __future__ import annotations

import pytest
import torch

from trencadis.errors import OutOfMemoryError
from trencadis_torch.kv_cache import AttentionLayer, PagedKVCache

CPU = torch.device("cpu")


def layer(index, *, heads=2, key_dim=4, value_dim=3):
    return AttentionLayer(
        index=index, num_kv_heads=heads, key_dim=key_dim, value_dim=value_dim, window=0, dtype=torch.float32
    )


@pytest.fixture
def cache():
    return PagedKVCache((layer(0), layer(5, heads=1)), num_blocks=3, block_size=2, device=CPU)


def test_layers_have_their_own_shapes_and_one_block_more(cache):
    assert [tuple(keys.shape) for keys in cache.keys] == [(4, 2, 2, 4), (4, 2, 1, 4)]
    assert [tuple(values.shape) for values in cache.values] == [(4, 2, 2, 3), (4, 2, 1, 3)]
    assert cache.padding_block == 3
    assert layer(0).bytes_per_token == 2 * (4 + 3) * 4


def test_new_keys_land_in_their_slots_and_nowhere_else(cache):
    keys, values = torch.rand(2, 1, 4), torch.rand(2, 1, 3)
    cache.write(5, torch.tensor([5, 0]), keys, values)
    stored_keys, stored_values = cache.layer(5)
    assert torch.equal(stored_keys[2, 1], keys[0])
    assert torch.equal(stored_values[0, 0], values[1])
    assert int((stored_keys != 0).any(-1).sum()) == 2
    assert not cache.keys[0].any()


def test_tokens_move_over_each_other_because_sources_are_read_first(cache):
    for part in cache.parts:
        part.copy_(torch.arange(part.numel()).view_as(part))
    before = [part.flatten(0, 1).clone() for part in cache.parts]
    cache.move(torch.tensor([3, 4, 1]), torch.tensor([2, 3, 1]))
    for part, old in zip(cache.parts, before, strict=True):
        assert torch.equal(part.flatten(0, 1), old[[0, 1, 3, 4, 4, 5, 6, 7]])


def test_blocks_swap_because_sources_are_read_first(cache):
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.rand_like(tensor))
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_blocks(torch.tensor([0, 2]), torch.tensor([2, 0]))
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(new[[2, 1, 0, 3]], old)


def test_cache_may_be_written_outside_the_backends_thread_mode(cache):
    with torch.inference_mode():
        cache.write(0, torch.tensor([0]), torch.ones(1, 2, 4), torch.ones(1, 2, 3))
    cache.keys[0][1].copy_(torch.ones(2, 2, 4))
    assert cache.keys[0][1].sum() == 16


def test_cache_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(OutOfMemoryError, match=r"1099511627776 blocks, .* MiB"):
        PagedKVCache((layer(0),), num_blocks=1 << 40, block_size=128, device=CPU)
