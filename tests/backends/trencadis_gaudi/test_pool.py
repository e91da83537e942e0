from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trencadis.clock import SystemClock
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.emulated import EmulatedDeviceError
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.pool import GaudiPool, pieces
from trencadis_torch.cache.kv_cache import AttentionLayer

NUM_BLOCKS = 50


def make_pool(mode, *, warms_up=True):
    habana = load_habana(GaudiConfig(device="emulated", mode=mode), clock=SystemClock())
    layers = tuple(
        AttentionLayer(index=index, num_kv_heads=2, key_dim=6, value_dim=4, window=0, dtype=torch.bfloat16)
        for index in range(2)
    )
    with habana.active():
        cache = FlatKVCache(layers, num_blocks=NUM_BLOCKS, block_size=4, device=habana.device)
        habana.mark_step()
    pool = GaudiPool(cache, habana)
    if warms_up:
        pool.warm_up()
        habana.freeze()
    return pool


def drawn(num_blocks, pool):
    rng = np.random.default_rng(num_blocks)
    # Any bytes, but for those of numbers that are none: these may come back as others.
    return rng.integers(0, 0x7F, (num_blocks, pool.layout.block_bytes), np.uint8)


@given(st.integers(0, 300))
def test_pieces_are_the_list_in_order(num_blocks):
    assert [at for piece in pieces(num_blocks) for at in range(num_blocks)[piece]] == list(range(num_blocks))


@pytest.mark.parametrize("mode", ["lazy", "compile", "eager"])
def test_blocks_come_back_as_they_were_and_no_number_of_them_is_compiled(mode):
    pool = make_pool(mode)
    order = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    for num_blocks in (1, 3, 8, 21, NUM_BLOCKS):
        blocks, data = order[:num_blocks], drawn(num_blocks, pool)
        pool.write_blocks(blocks, data)
        found = np.zeros_like(data)
        pool.read_blocks(blocks[::-1], found)
        assert (found[::-1] == data).all()


def test_bytes_are_those_of_the_layout():
    pool = make_pool("eager")
    data = drawn(2, pool)
    pool.write_blocks([3, 5], data)
    at = 0
    for part in pool._cache.parts:
        own = part.cpu()[[3, 5]].flatten(1).view(torch.uint8).numpy()
        assert (own == data[:, at : at + own.shape[1]]).all()
        at += own.shape[1]
    assert at == pool.layout.block_bytes


def test_bytes_land_where_the_kernels_read():
    pool = make_pool("eager", warms_up=False)
    data = np.zeros((2, pool.layout.block_bytes), np.uint8)
    data[1] = drawn(1, pool)
    pool.write_blocks([0, 4], data)
    for layer in pool._cache.layers:
        for part in pool._cache.flat_layer(layer.index).first(5):
            blocks = part.cpu().view(torch.int16)
            assert blocks[4].any()
            assert not blocks[:4].any()
    assert not pool.any_thread


def test_without_a_warm_up_each_size_is_compiled():
    pool = make_pool("lazy", warms_up=False)
    pool._habana.freeze()
    with pytest.raises(EmulatedDeviceError, match="would be compiled"):
        pool.read_blocks([1], drawn(1, pool))
