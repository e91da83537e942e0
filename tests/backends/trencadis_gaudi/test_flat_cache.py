from __future__ import annotations

import pytest
import torch

from trencadis.clock import SystemClock
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.habana import load_habana
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

LAYERS = tuple(
    AttentionLayer(index=index, num_kv_heads=2, key_dim=3, value_dim=value_dim, window=0, dtype=torch.float32)
    for index, value_dim in ((1, 2), (4, 3))
)


@pytest.fixture(autouse=True)
def habana():
    """A device of this test's own: the newest one has the operations."""
    return load_habana(GaudiConfig(device="emulated", mode="eager"), clock=SystemClock())


@pytest.mark.parametrize("device", ["hpu", "meta"])
def test_keys_and_values_are_flat_with_the_padding_block_last(device):
    cache = FlatKVCache(LAYERS, num_blocks=5, block_size=4, device=torch.device(device))
    for layer in LAYERS:
        flat = cache.flat_layer(layer.index)
        assert flat.keys.shape == (24, 2, 3)
        assert flat.values.shape == (24, 2, layer.value_dim)
        assert [part.shape[:2] for part in cache.layer(layer.index)] == [(6, 4), (6, 4)]
    # Nothing a graph writes to is a view.
    assert device == "meta" or not cache.flat_layer(1).keys.is_view


def test_blocks_are_views_of_the_same_memory():
    caches = [
        kind(LAYERS, num_blocks=5, block_size=4, device=torch.device("hpu")) for kind in (FlatKVCache, PagedKVCache)
    ]
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([9, 2, 23]).to("hpu")
    for layer in LAYERS:
        new = [torch.randn(3, 2, dim, generator=generator).to("hpu") for dim in (3, layer.value_dim)]
        for cache in caches:
            cache.write(layer.index, slots, *new)
    for cache in caches:
        cache.copy_blocks(torch.tensor([2, 0]).to("hpu"), torch.tensor([0, 3]).to("hpu"))
    for flat, paged in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        assert torch.equal(flat, paged)
        assert flat.any()


def test_low_bits_are_those_of_other_kernels_than_torchs():
    cache = FlatKVCache(LAYERS, num_blocks=5, block_size=4, device=torch.device("hpu"))
    assert cache.layout.numerics == "gaudi-hpu"
