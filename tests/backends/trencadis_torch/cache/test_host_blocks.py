from __future__ import annotations

import itertools
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.devices import DEVICE, cuda_only
from trencadis.errors import OutOfMemoryError
from trencadis.interfaces import BlockCopies
from trencadis_torch.cache.host_blocks import HostBlocks, runs
from trencadis_torch.cache.host_parts import HostParts
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


SIZES = [6, 6, 4, 4]
"""Of two layers: keys of 6 bytes, values of 4."""


@pytest.fixture(params=[SIZES, [5, 5, 5, 5], [6, 2, 2, 6], [3, 1]], ids=str)
def filled(request):
    parts = HostParts(request.param, 9)
    noise = np.random.default_rng(0)
    for rows in parts.rows:
        rows[:] = noise.integers(0, 256, rows.shape, np.uint8)
    return parts


def expected(parts, blocks):
    return np.array([np.concatenate([rows[block] for rows in parts.rows]) for block in blocks])


BLOCKS = ([4], [1, 2, 3], [8, 0, 1, 5, 4, 6, 7], np.array([2, 7], np.int32))


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_blocks_are_written_and_others_are_not(filled, blocks):
    before = expected(filled, range(9))
    data = np.random.default_rng(1).integers(0, 256, (len(blocks), before.shape[1]), np.uint8)
    filled.write(blocks, data)
    before[blocks] = data
    assert (expected(filled, range(9)) == before).all()


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_rows_that_lie_apart_are_copied_like_others(filled, blocks):
    size = sum(rows.shape[1] for rows in filled.rows)
    wide = np.zeros((len(blocks), size + 7), np.uint8)
    filled.read(blocks, wide[:, 3 : 3 + size])
    assert (wide[:, 3 : 3 + size] == expected(filled, blocks)).all()
    assert not wide[:, :3].any()
    assert not wide[:, 3 + size :].any()


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_layer_is_its_keys_then_its_values(filled, blocks):
    num_layers = len(filled.rows) // 2
    for place in range(num_layers):
        keys, values = filled.rows[place], filled.rows[num_layers + place]
        out = np.zeros((len(blocks), keys.shape[1] + values.shape[1]), np.uint8)
        filled.read_layer(place, blocks, out)
        assert (out == np.concatenate([keys[blocks], values[blocks]], axis=1)).all()
        before = expected(filled, range(9))
        filled.write_layer(place, blocks, 255 - out)
        assert (keys[blocks] == 255 - out[:, : keys.shape[1]]).all()
        assert (values[blocks] == 255 - out[:, keys.shape[1] :]).all()
        filled.write_layer(place, blocks, out)
        assert (expected(filled, range(9)) == before).all()


def test_data_of_the_wrong_size_is_refused_before_anything_is_written(filled):
    before = expected(filled, range(9))
    for shape in ((1, before.shape[1]), (3, before.shape[1]), (2, before.shape[1] - 1)):
        with pytest.raises(ValueError, match="bytes of each"):
            filled.write([1, 2], np.ones(shape, np.uint8)[: shape[0], : shape[1]])
    assert (expected(filled, range(9)) == before).all()


def test_views_are_the_rows_themselves_which_begin_as_zeros(filled):
    filled.rows[0][4, 0] ^= 255
    assert b"".join(filled.view(4)) == expected(filled, [4])[0].tobytes()
    assert not any(rows.any() for rows in HostParts(SIZES, 3).rows)


def test_copy_of_a_block_lets_other_threads_run_python():
    """Nobody is made to give up Python's lock, so the other thread moves only while a copy has given it up."""
    parts = HostParts([1 << 16] * 24, 3)
    data, count, stop = np.ones((1, 24 << 16), np.uint8), [0], threading.Event()

    def run():
        while not stop.wait(0.0001):
            count[0] += 1

    before_s = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(1000.0)
    try:
        seen, until_s = count[0], time.monotonic() + 20.0
        while count[0] == seen and time.monotonic() < until_s:
            parts.write([1], data)
        moved = count[0] > seen
    finally:
        sys.setswitchinterval(before_s)
        stop.set()
        thread.join()
    assert moved
