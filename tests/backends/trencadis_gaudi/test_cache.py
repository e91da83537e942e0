"""The flat cache, its blocks as bytes, and blocks that change places on the device and with the host."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.backends.passes import ints
from trencadis.clock import SystemClock
from trencadis.interfaces import BlockCopies
from trencadis_gaudi.block_swaps import THRESHOLDS, BlockSwaps, padded_length
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.emulated.device import EmulatedDeviceError
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.pool import GaudiPool, pieces
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

LAYERS = tuple(
    AttentionLayer(index=index, num_kv_heads=2, key_dim=6, value_dim=value_dim, window=0, dtype=torch.bfloat16)
    for index, value_dim in ((1, 2), (4, 4))
)
MODES = ("lazy", "compile", "eager")


def make(mode="lazy", *, num_blocks=6, dtype=torch.bfloat16, **options):
    """Return a device of the test's own, as the newest one has the operations, and a cache of random contents."""
    habana = load_habana(GaudiConfig(device="emulated", mode=mode, **options), clock=SystemClock())
    layers = tuple(attrs.evolve(layer, dtype=dtype) for layer in LAYERS)
    with habana.active():
        cache = FlatKVCache(layers, num_blocks=num_blocks, block_size=4, device=habana.device)
        generator = torch.Generator().manual_seed(1)
        for part in cache.parts:
            part.copy_(torch.rand(part.shape, generator=generator))
        habana.mark_step()
    habana.emulated.num_compilations = 0
    return habana, cache


def swaps_of(*args, num_host_blocks=0, **options):
    habana, cache = make(*args, **options)
    return habana, cache, BlockSwaps(cache, habana.config, habana, num_host_blocks=num_host_blocks)


def bits(cache):
    return [part.cpu().view(torch.uint8) for part in cache.parts]


def same(before, cache):
    return all(torch.equal(old, new) for old, new in zip(before, bits(cache), strict=True))


# ------------------------------------------------------------------------------------------------------- the cache
@pytest.mark.parametrize("device", ["hpu", "meta"])
def test_keys_and_values_are_flat_with_the_padding_block_last(device):
    habana, _ = make()
    cache = FlatKVCache(LAYERS, num_blocks=5, block_size=4, device=torch.device(device))
    for layer in LAYERS:
        flat = cache.flat_layer(layer.index)
        assert (flat.keys.shape, flat.values.shape) == ((24, 2, 6), (24, 2, layer.value_dim))
        assert [part.shape[:2] for part in cache.layer(layer.index)] == [(6, 4), (6, 4)]
    # Nothing a graph writes to is a view.
    assert device == "meta" or not cache.flat_layer(1).keys.is_view
    assert cache.layout.numerics == f"gaudi-{device}"
    assert habana.device.type == "hpu"


def test_blocks_are_views_of_the_same_memory():
    habana, _ = make("eager")
    caches = [kind(LAYERS, num_blocks=5, block_size=4, device=habana.device) for kind in (FlatKVCache, PagedKVCache)]
    slots = torch.tensor([9, 2, 23]).to("hpu")
    for layer in LAYERS:
        new = [torch.randn(3, 2, dim).bfloat16().to("hpu") for dim in (6, layer.value_dim)]
        for cache in caches:
            cache.write(layer.index, slots, *new)
    for cache in caches:
        cache.copy_blocks(torch.tensor([2, 0]).to("hpu"), torch.tensor([0, 3]).to("hpu"))
    for flat, paged in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        assert torch.equal(flat, paged)
        assert flat.any()


# ----------------------------------------------------------------------------------------------------------- swaps
def test_copies_are_padded_to_two_for_each_pair_of_a_threshold():
    expected = {1: 16, 16: 16, 17: 32, 70: 128, 1024: 1024, 1025: 2048, 3000: 4096}
    assert {copies: padded_length(copies) for copies in expected} == expected


@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_blocks_change_places_and_nothing_else_moves(mode):
    habana, cache, swaps = swaps_of(mode)
    before = bits(cache)
    with habana.active(), torch.inference_mode():
        swaps.copy(ints(5, 1, 4), ints(1, 5, 2))
        swaps.copy(ints(0, 3), ints(3, 0))
    for part, old in zip(bits(cache), before, strict=True):
        assert torch.equal(part, old[[3, 5, 4, 0, 4, 1, 6]])
    assert habana.emulated.num_compilations == 1


@pytest.mark.parametrize(
    ("mode", "options"),
    [("lazy", {}), ("lazy", {"defragmenter_graphs": "on"}), ("compile", {"defragmenter_graphs": "off"})],
)
def test_warm_up_leaves_the_cache_as_it_was(mode, options, caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    habana, cache, swaps = swaps_of(mode, **options)
    before = bits(cache)
    with habana.active(), torch.inference_mode():
        assert swaps.warm_up() == 8
    assert same(before, cache)
    assert caplog.messages == [
        "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]",
        "Defragmenter warmup completed successfully",
    ]


def test_swaps_of_every_warmed_size_compile_nothing_after_the_warm_up():
    habana, _, swaps = swaps_of(num_blocks=600)
    with habana.active(), torch.inference_mode():
        swaps.warm_up()
        assert habana.emulated.num_compilations == len(THRESHOLDS)
        habana.freeze()
        for count in (1, 5, 8, 9, 40, 200, 299):
            one = np.arange(count, dtype=np.int32)
            swaps.copy(np.concatenate([one, one + 300]), np.concatenate([one + 300, one]))


def test_cache_of_one_block_has_nothing_to_swap(caplog):
    """The lines and their order are those of vllm-gaudi, docs/features/warmup.md."""
    caplog.set_level("INFO", logger="trencadis.gaudi")
    _, _, swaps = swaps_of(num_blocks=1)
    assert swaps.warm_up() == 0
    assert caplog.messages == [
        "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]",
        "Skipping defragmenter warmup, insufficient blocks (2)",
    ]


@pytest.mark.representatives(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_from_host_memory_bit_for_bit(mode, dtype):
    habana, cache, swaps = swaps_of(mode, num_host_blocks=4, dtype=dtype)
    before, none = bits(cache), BlockCopies.none()
    with habana.active(), torch.inference_mode():
        swaps.swap(outs=BlockCopies(sources=ints(5, 1, 4), targets=ints(0, 2, 3)), ins=none)
    for part in cache.parts:
        part[[5, 1, 4]] = 0
    with habana.active(), torch.inference_mode():
        swaps.swap(outs=none, ins=BlockCopies(sources=ints(3, 0, 2), targets=ints(1, 4, 5)))
    for part, old in zip(bits(cache), before, strict=True):
        assert torch.equal(part, old[[0, 4, 2, 3, 5, 1, 6]])


def test_swaps_with_the_host_of_any_number_of_blocks_compile_nothing_after_the_warm_up():
    habana, cache, swaps = swaps_of(num_blocks=40, num_host_blocks=30)
    before = bits(cache)
    with habana.active(), torch.inference_mode():
        swaps.warm_up_host()
        habana.freeze()
        for count in (1, 2, 7, 30):
            one = np.arange(count, dtype=np.int32)
            swaps.swap(outs=BlockCopies(sources=one + 3, targets=one), ins=BlockCopies.none())
            swaps.swap(outs=BlockCopies.none(), ins=BlockCopies(sources=one, targets=one + 3))
    assert same(before, cache)
    habana, _, without = swaps_of()
    with habana.active(), torch.inference_mode():
        without.warm_up_host()
    assert habana.emulated.num_compilations == 0


# -------------------------------------------------------------------------------------------------------- the pool
def pool_of(mode, *, warms_up=True):
    habana, cache = make(mode, num_blocks=50)
    pool = GaudiPool(cache, habana)
    if warms_up:
        pool.warm_up()
        habana.freeze()
    return pool


def drawn(num_blocks, pool):
    # Any bytes, but for those of numbers that are none: these may come back as others.
    return np.random.default_rng(num_blocks).integers(0, 0x7F, (num_blocks, pool.layout.block_bytes), np.uint8)


@given(st.integers(0, 300))
def test_pieces_are_the_list_in_order(num_blocks):
    assert [at for piece in pieces(num_blocks) for at in range(num_blocks)[piece]] == list(range(num_blocks))


@pytest.mark.representatives(3)
@pytest.mark.parametrize("mode", MODES)
def test_blocks_come_back_as_they_were_and_no_number_of_them_is_compiled(mode):
    pool = pool_of(mode)
    order = np.random.default_rng(1).permutation(50).tolist()
    for num_blocks in (1, 3, 8, 21, 50):
        blocks, data = order[:num_blocks], drawn(num_blocks, pool)
        pool.write_blocks(blocks, data)
        found = np.zeros_like(data)
        pool.read_blocks(blocks[::-1], found)
        assert (found[::-1] == data).all()


def test_bytes_are_those_of_the_layout_where_the_kernels_read():
    pool = pool_of("eager", warms_up=False)
    data = drawn(2, pool)
    pool.write_blocks([3, 5], data)
    at = 0
    for part in pool._cache.parts:
        own = part.cpu()[[3, 5]].flatten(1).view(torch.uint8).numpy()
        assert (own == data[:, at : at + own.shape[1]]).all()
        at += own.shape[1]
    assert at == pool.layout.block_bytes
    assert not pool.any_thread
    for layer in pool._cache.layers:
        for flat, part in zip(
            pool._cache.flat_layer(layer.index).first(6), pool._cache.layer(layer.index), strict=True
        ):
            assert torch.equal(flat.cpu(), part[:6].cpu())


def test_without_a_warm_up_each_size_is_compiled():
    pool = pool_of("lazy", warms_up=False)
    pool._habana.freeze()
    with pytest.raises(EmulatedDeviceError, match="would be compiled"):
        pool.read_blocks([1], drawn(1, pool))
