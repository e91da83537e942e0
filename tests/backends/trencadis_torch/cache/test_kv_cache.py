from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.devices import DEVICE, cpu_only
from support.memory import needs_statm, resident_bytes
from trencadis.errors import OutOfMemoryError
from trencadis_kv.store.identity import compat_id
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache, stored_layers
from trencadis_torch.cache.storage import STORED_DTYPES, decode, encode, stored_dim

CPU, HERE = torch.device("cpu"), torch.device(DEVICE)


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


@needs_statm
def test_memory_is_given_when_it_is_written_or_all_of_it_at_once():
    before = resident_bytes()
    cache = PagedKVCache((layer(0, heads=64, key_dim=64, value_dim=64),), num_blocks=1023, block_size=2, device=CPU)
    size = sum(part.nbytes for part in cache.parts)
    assert size == 64 << 20
    assert resident_bytes() - before < size / 4
    cache.prefault()
    assert resident_bytes() - before > size * 3 / 4
    assert not any(part.any() for part in cache.parts)


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


def test_cache_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(OutOfMemoryError, match=r"1099511627776 blocks, .* MiB"):
        PagedKVCache((layer(0),), num_blocks=1 << 40, block_size=128, device=CPU)


# ------------------------------------------------------------------------------------------- as a pool of blocks


def filled(dtype, device=HERE, kind=PagedKVCache):
    layers = tuple(attrs.evolve(layer(index, heads=heads), dtype=dtype) for index, heads in ((0, 2), (5, 1)))
    cache = kind(layers, num_blocks=5, block_size=2, device=device)
    generator = torch.Generator().manual_seed(0)
    for part in cache.parts:
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache


def read(cache, blocks):
    data = np.empty((len(blocks), cache.layout.block_bytes), np.uint8)
    cache.read_blocks(blocks, data)
    return data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_block_are_its_keys_then_its_values_layer_by_layer(dtype):
    cache = filled(dtype)
    data = read(cache, [4, 1])
    for row, block in zip(data, [4, 1], strict=True):
        expected = b"".join(
            part[block].contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in (*cache.keys, *cache.values)
        )
        assert row.tobytes() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_written_elsewhere_are_the_same_and_others_are_untouched(dtype):
    cache = filled(dtype)
    before = [part.clone() for part in cache.parts]
    cache.write_blocks([0, 3], read(cache, [3, 1]))
    for part, old in zip(cache.parts, before, strict=True):
        assert torch.equal(part, old[[3, 1, 2, 1, 4, 5]])


def test_memory_that_cannot_be_written_to_is_a_source_like_any_other():
    """What came out of a decoder, say; no warning either."""
    cache = filled(torch.float32)
    content = read(cache, [2])
    cache.write_blocks([4], np.frombuffer(content.tobytes(), np.uint8).reshape(1, -1))
    assert (read(cache, [4]) == content).all()


@cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_blocks_are_their_bytes_where_they_lie(dtype):
    cache = filled(dtype)
    blocks = np.array([4, 1], np.int32)
    views = cache.view_blocks(blocks)
    assert [b"".join(pieces) for pieces in views] == [row.tobytes() for row in read(cache, blocks)]
    cache.values[1][1].zero_()
    assert not any(views[1][-1])
    assert any(views[0][-1])


def test_layout_names_every_part_and_its_size():
    layout = filled(torch.bfloat16).layout
    assert [(part.layer, part.kind, part.num_heads, part.head_dim) for part in layout.parts] == [
        (0, "key", 2, 4),
        (5, "key", 1, 4),
        (0, "value", 2, 3),
        (5, "value", 1, 3),
    ]
    assert {part.dtype for part in layout.parts} == {"bfloat16"}
    assert layout.block_bytes == 2 * (3 * 4 + 3 * 3) * 2
    assert (layout.first_head, layout.last_head, layout.rotated, layout.numerics) == (0, 2, True, f"torch-{HERE.type}")


@cpu_only
def test_pool_of_a_cpu_may_be_used_from_any_thread():
    cache = filled(torch.float32)
    content = read(cache, [1])
    with ThreadPoolExecutor(1) as thread:
        thread.submit(cache.write_blocks, [2], content).result()
        assert (thread.submit(read, cache, [2]).result() == content).all()
    assert cache.any_thread


# -------------------------------------------------------------------------------------------------- how it is held

KV_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bytes_of_a_token_are_those_of_the_tensors(kv_dtype):
    layers = stored_layers((layer(0), layer(5, heads=1)), kv_dtype)
    cache = PagedKVCache(layers, num_blocks=3, block_size=2, device=CPU)
    scales = 2 * 4 if kv_dtype == "int8" else 0
    expected = (2 + 1) * ((4 + 3) * KV_DTYPES[kv_dtype] + scales)
    assert sum(one.bytes_per_token for one in layers) == expected
    assert sum(part[0].numel() * part.element_size() for part in cache.parts) == 2 * expected
    assert cache.layout.block_bytes == 2 * expected


def test_stores_never_take_blocks_held_otherwise_for_the_same():
    ids = {
        compat_id(
            PagedKVCache(stored_layers((layer(0),), name), num_blocks=1, block_size=2, device=CPU).layout,
            identity="model",
            exact_numerics=exact,
        )
        for name in KV_DTYPES
        for exact in (True, False)
    }
    assert len(ids) == 2 * len(KV_DTYPES)


def test_blocks_of_int8_move_with_their_scales():
    cache = PagedKVCache(stored_layers((layer(0),), "int8"), num_blocks=4, block_size=2, device=CPU)
    keys, values = torch.randn(2, 2, 4), torch.randn(2, 2, 3)
    cache.write(0, torch.tensor([2, 3]), keys, values)
    cache.write_blocks([3], read(cache, [1]))
    cache.copy_blocks(torch.tensor([3]), torch.tensor([0]))
    cache.move(torch.tensor([1]), torch.tensor([4]))
    stored = cache.keys[0].flatten(0, 1)
    for slot, token in ((2, 0), (3, 1), (6, 0), (7, 1), (0, 0), (4, 1)):
        assert float((decode(stored[slot], torch.float32) - keys[token]).abs().max()) < 0.02


# The largest error of one element over the largest element of its head: half a unit in the last place. Numbers below the smallest
# normal one of float16, 2 ** -14, are rounded to a multiple of 2 ** -24.
BOUNDS = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.5 / 127 * 1.0001}


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(
    name=st.sampled_from(sorted(BOUNDS)), seed=st.integers(0, 999), dim=st.integers(1, 70), size=st.floats(1e-3, 1e3)
)
def test_what_is_read_is_what_was_written_within_the_format(name, seed, dim, size):
    new = torch.randn(5, 3, dim, generator=torch.Generator().manual_seed(seed)) * size
    dtype = STORED_DTYPES[name]
    stored = encode(new, dtype)
    assert stored.dtype is dtype
    assert stored.shape == (5, 3, stored_dim(dim, dtype))
    error = (decode(stored, torch.float32) - new).abs()
    smallest = 2**-25 if name == "float16" else 1e-12
    assert bool((error <= BOUNDS[name] * new.abs().amax(-1, keepdim=True) + smallest).all())


def test_zeros_of_int8_are_zeros():
    assert not decode(encode(torch.zeros(2, 1, 6), torch.int8), torch.float32).any()


def test_scale_of_int8_is_that_of_its_own_head_and_lies_behind_it():
    new = torch.tensor([[[127.0, -64.0], [1.27, 0.01]]])
    stored = encode(new, torch.int8)
    assert stored[0, :, :2].tolist() == [[127, -64], [127, 1]]
    assert stored[0, :, 2:].contiguous().view(torch.float32).flatten().tolist() == pytest.approx([1.0, 0.01])


def test_too_large_for_float16_is_its_largest_and_no_infinity():
    stored = encode(torch.tensor([1e6, -1e6, 3.0]), torch.float16)
    assert stored.tolist() == [65504.0, -65504.0, 3.0]


def test_what_is_held_in_the_models_dtype_is_not_copied():
    new = torch.randn(2, 2)
    assert encode(new, torch.float32).data_ptr() == new.data_ptr() == decode(new, torch.float32).data_ptr()
