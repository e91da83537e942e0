from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from trencadis.clock import SystemClock
from trencadis.interfaces import BlockCopies
from trencadis_gaudi.block_swaps import THRESHOLDS, BlockSwaps, padded_length
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.habana import load_habana
from trencadis_torch.cache.kv_cache import AttentionLayer


def make(num_blocks=6, num_host_blocks=0, **options):
    dtype = options.pop("dtype", torch.float32)
    config = GaudiConfig(device="emulated", **{"mode": "lazy", **options})
    habana = load_habana(config, clock=SystemClock())
    layers = tuple(
        AttentionLayer(index=i, num_kv_heads=1, key_dim=2, value_dim=3, window=0, dtype=dtype) for i in range(2)
    )
    cache = FlatKVCache(layers, num_blocks=num_blocks, block_size=4, device=habana.device)
    generator = torch.Generator().manual_seed(1)
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.rand(part.shape, generator=generator))
    habana.mark_step()
    habana.emulated.num_compilations = 0
    return habana, cache, BlockSwaps(cache, config, habana, num_host_blocks=num_host_blocks)


def checksum(cache):
    parts = [part.cpu().double() for part in (*cache.keys, *cache.values)]
    return [part.sum().item() for part in parts] + [
        (part.flatten() * torch.arange(part.numel())).sum().item() for part in parts
    ]


def ints(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("copies", "padded"), [(1, 16), (16, 16), (17, 32), (70, 128), (1024, 1024), (1025, 2048), (3000, 4096)]
)
def test_copies_are_padded_to_two_for_each_pair_of_a_threshold(copies, padded):
    assert padded_length(copies) == padded


def test_blocks_change_places_and_nothing_else_moves():
    habana, cache, swaps = make()
    before = [part.cpu() for part in (*cache.keys, *cache.values)]
    with habana.active(), torch.inference_mode():
        swaps.copy(ints(5, 1, 4), ints(1, 5, 2))
    for part, old in zip([part.cpu() for part in (*cache.keys, *cache.values)], before, strict=True):
        assert torch.equal(part[[1, 5, 2]], old[[5, 1, 4]])
        assert torch.equal(part[[0, 3, 4, 6]], old[[0, 3, 4, 6]])


@pytest.mark.parametrize(
    "options", [{}, {"defragmenter_graphs": "on"}, {"mode": "compile", "defragmenter_graphs": "off"}]
)
def test_warm_up_leaves_the_cache_as_it_was(options, caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    habana, cache, swaps = make(**options)
    before = checksum(cache)
    with habana.active(), torch.inference_mode():
        assert swaps.warm_up() == 8
    assert checksum(cache) == before
    assert "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]" in caplog.text
    assert "Defragmenter warmup completed successfully" in caplog.text


def test_swaps_of_every_warmed_size_compile_nothing_after_the_warm_up():
    habana, _, swaps = make(num_blocks=600)
    with habana.active(), torch.inference_mode():
        swaps.warm_up()
        assert habana.emulated.num_compilations == len(THRESHOLDS)
        habana.freeze()
        for count in (1, 5, 8, 9, 40, 200, 299):
            ids = np.arange(count, dtype=np.int32)
            swaps.copy(np.concatenate([ids, ids + 300]), np.concatenate([ids + 300, ids]))


def test_compiled_swaps_move_blocks_and_are_compiled_once_a_size():
    habana, cache, swaps = make(mode="compile")
    old = cache.keys[0].cpu()
    with habana.active(), torch.inference_mode():
        swaps.copy(ints(0, 3), ints(3, 0))
        swaps.copy(ints(1, 2), ints(2, 1))
    assert torch.equal(cache.keys[0].cpu()[[3, 0, 2, 1]], old[[0, 3, 1, 2]])
    assert habana.emulated.num_compilations == 1


def test_cache_of_one_block_has_nothing_to_swap(caplog):
    """The lines and their order are those of vllm-gaudi, docs/features/warmup.md."""
    _, _, swaps = make(num_blocks=1)
    with caplog.at_level(logging.INFO, "trencadis.gaudi"):
        assert swaps.warm_up() == 0
    assert caplog.messages == [
        "Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]",
        "Skipping defragmenter warmup, insufficient blocks (2)",
    ]


@pytest.mark.parametrize("mode", ["lazy", "eager", "compile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_from_host_memory_bit_for_bit(mode, dtype):
    habana, cache, swaps = make(num_host_blocks=4, mode=mode, dtype=dtype)
    before = [part.cpu().view(torch.uint8) for part in cache.parts]
    with habana.active(), torch.inference_mode():
        swaps.swap(outs=BlockCopies(sources=ints(5, 1, 4), targets=ints(0, 2, 3)), ins=BlockCopies.none())
    for part in cache.parts:
        part[[5, 1, 4]] = 0
    with habana.active(), torch.inference_mode():
        swaps.swap(outs=BlockCopies.none(), ins=BlockCopies(sources=ints(3, 0, 2), targets=ints(1, 4, 5)))
    for part, old in zip(cache.parts, before, strict=True):
        bits = part.cpu().view(torch.uint8)
        assert torch.equal(bits[[1, 4, 5]], old[[4, 5, 1]])
        assert torch.equal(bits[[0, 2, 3, 6]], old[[0, 2, 3, 6]])


def test_swaps_with_the_host_of_any_number_of_blocks_compile_nothing_after_the_warm_up():
    habana, cache, swaps = make(num_blocks=40, num_host_blocks=30)
    before = checksum(cache)
    with habana.active(), torch.inference_mode():
        swaps.warm_up_host()
        habana.freeze()
        for count in (1, 2, 7, 30):
            ids = np.arange(count, dtype=np.int32)
            swaps.swap(outs=BlockCopies(sources=ids + 3, targets=ids), ins=BlockCopies.none())
            swaps.swap(outs=BlockCopies.none(), ins=BlockCopies(sources=ids, targets=ids + 3))
    assert checksum(cache) == before


def test_without_host_blocks_there_is_nothing_to_warm_up():
    habana, _, swaps = make()
    with habana.active(), torch.inference_mode():
        swaps.warm_up_host()
    assert habana.emulated.num_compilations == 0
