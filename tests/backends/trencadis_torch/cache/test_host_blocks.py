from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.devices import DEVICE, cuda_only
from trencadis.errors import OutOfMemoryError
from trencadis.interfaces import BlockCopies
from trencadis_torch.cache.host_blocks import HostBlocks, runs
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache


def cache_of(dtype, num_blocks=8, device=DEVICE):
    layers = tuple(
        AttentionLayer(index=i, num_kv_heads=heads, key_dim=4, value_dim=3, window=0, dtype=dtype)
        for i, heads in enumerate((2, 1))
    )
    cache = PagedKVCache(layers, num_blocks=num_blocks, block_size=4, device=torch.device(device))
    for part in cache.parts:
        # Any bits at all: not-a-number, infinities and negative zeros must come back too.
        bits = torch.randint(0, 256, part.view(torch.uint8).shape, dtype=torch.uint8)
        part.view(torch.uint8).copy_(bits)
    return cache


def bits(cache):
    return [part.view(torch.uint8).clone().cpu() for part in cache.parts]


def copies(*pairs):
    both = np.array(pairs, np.int32).reshape(-1, 2)
    return BlockCopies(sources=both[:, 0].copy(), targets=both[:, 1].copy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_comes_back_to_other_blocks_and_nothing_else_changes(dtype):
    cache = cache_of(dtype)
    host = HostBlocks(cache, num_blocks=5)
    before = bits(cache)
    host.swap(outs=copies((6, 0), (1, 1), (3, 4)), ins=BlockCopies.none())
    for part in cache.parts:
        part.view(torch.uint8)[[6, 1, 3]] = 7
    host.swap(outs=BlockCopies.none(), ins=copies((4, 0), (0, 1), (1, 6)))
    for part, old in zip(bits(cache), before, strict=True):
        assert torch.equal(part[[0, 1, 6]], old[[3, 6, 1]])
        assert torch.equal(part[[2, 4, 5, 7]], old[[2, 4, 5, 7]])
        assert (part[3] == 7).all()


def test_blocks_go_out_before_others_come_in():
    cache = cache_of(torch.float32)
    host = HostBlocks(cache, num_blocks=4)
    before = bits(cache)
    host.swap(outs=copies((5, 0)), ins=BlockCopies.none())
    host.swap(outs=copies((2, 1)), ins=copies((0, 2)))
    host.swap(outs=BlockCopies.none(), ins=copies((1, 7)))
    for part, old in zip(bits(cache), before, strict=True):
        assert torch.equal(part[[2, 7]], old[[5, 2]])


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_number_of_blocks_in_one_copy_does_not_matter(most):
    cache = cache_of(torch.float32)
    sizes = []

    def gather(blocks):
        sizes.append(len(blocks))
        return cache.gather(blocks)

    host = HostBlocks(cache, num_blocks=8, gather=gather, most=most)
    before = bits(cache)
    ids = np.array([7, 2, 5, 0, 3], np.int32)
    host.swap(outs=BlockCopies(sources=ids, targets=np.arange(5, dtype=np.int32)), ins=BlockCopies.none())
    for part in cache.parts:
        part.zero_()
    host.swap(outs=BlockCopies.none(), ins=BlockCopies(sources=np.arange(5, dtype=np.int32), targets=ids))
    assert max(sizes) <= most
    for part, old in zip(bits(cache), before, strict=True):
        assert torch.equal(part[ids], old[ids])


@settings(max_examples=60, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(ids=st.lists(st.integers(0, 30), max_size=25), most=st.integers(1, 9))
def test_runs_are_the_ids_in_order_in_pieces_that_count_up(ids, most):
    found = list(runs(np.array(ids, np.int32), most=most))
    assert [first + i for _, first, count in found for i in range(count)] == ids
    assert [at for at, _, _ in found] == [sum(count for _, _, count in found[:i]) for i in range(len(found))]
    assert all(1 <= count <= most for _, _, count in found)
    for (_, first, count), (_, after, _) in itertools.pairwise(found):
        assert count == most or after != first + count, "neighbours are copied together"


def test_host_memory_that_is_not_there_is_refused_with_its_size():
    with pytest.raises(OutOfMemoryError, match=r"The host has no room for 1099511627776 blocks .* MiB") as caught:
        HostBlocks(cache_of(torch.float32), num_blocks=1 << 40)
    assert "cache.swap_bytes" in caught.value.hint


@cuda_only
def test_host_memory_is_pinned_for_cuda():
    host = HostBlocks(cache_of(torch.bfloat16), num_blocks=3)
    assert all(part.is_pinned() for part in host._host)
