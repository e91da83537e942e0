from __future__ import annotations

import numpy as np
import pytest
import torch

from support.backends.dense_attention import dense_attention
from trencadis.errors import StepFailedError
from trencadis.records import Bucket, Phase
from trencadis_torch.attention.native import compiled_kernel
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.padded import PaddedKernelPass
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.native_build import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")
SIZE, HEADS = 4, 4


def scene(contexts, lengths, bucket, *, window):
    """Return a cache with contexts in it, tables, slots, new tensors of the pass, and every sequence's whole keys and values."""
    generator = torch.Generator().manual_seed(7)
    spec = AttentionLayer(index=0, num_kv_heads=2, key_dim=8, value_dim=6, window=window, dtype=torch.float32)
    cache = PagedKVCache((spec,), num_blocks=60, block_size=SIZE, device=torch.device("cpu"), kernel=compiled_kernel())
    tables = torch.randperm(60, generator=generator).view(-1, 10).int()
    shape = (bucket.batch_size, bucket.query_len)
    slots = torch.full(shape, cache.padding_block * SIZE)
    new = [torch.randn(*shape, h, d, generator=generator) for h, d in ((HEADS, 8), (2, 8), (2, 6))]
    whole = []
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        keys, values = (torch.randn(context + length, 2, dim, generator=generator) for dim in (8, 6))
        positions = torch.arange(context + length)
        place = tables[row, positions // SIZE].long() * SIZE + positions % SIZE
        cache.write(0, place[:context], keys[:context], values[:context])
        slots[row, :length] = place[context:]
        new[1][row, :length], new[2][row, :length] = keys[context:], values[context:]
        whole.append((keys, values))
    return cache, tables, slots.flatten(), new, whole


def pass_of(cache, tables, slots, contexts, lengths, bucket):
    facts = np.zeros((3, bucket.batch_size), np.int64)
    facts[:, : len(contexts)] = range(len(contexts)), contexts, lengths
    return PaddedKernelPass(cache, tables=tables, slots=slots, facts=facts, bucket=bucket)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.4, "softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}]
)
@pytest.mark.parametrize(
    ("contexts", "lengths", "bucket"),
    [
        ([0], [5], Bucket(1, 5, 0)),
        ([13, 4], [2, 6], Bucket(3, 8, 6)),
        ([4, 9, 0], [1, 1, 1], Bucket(5, 1, 12, Phase.DECODE)),
        ([11, 3], [3, 1], Bucket(3, 4, 7, Phase.DECODE)),
    ],
)
def test_outputs_follow_the_definition_and_those_of_padding_are_zero(contexts, lengths, bucket, window, options):
    cache, tables, slots, new, whole = scene(contexts, lengths, bucket, window=window)
    one = pass_of(cache, tables, slots, contexts, lengths, bucket)
    found = one.attend(0, *(part.flatten(0, 1) for part in new), options=AttentionOptions(**options))
    found = found.view(bucket.batch_size, bucket.query_len, HEADS, 6).double()
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        positions = list(range(context, context + length))
        expected = dense_attention(new[0][row, :length], *whole[row], positions=positions, window=window, **options)
        torch.testing.assert_close(found[row, :length], expected, atol=1e-5, rtol=0)
        assert not found[row, length:].any()
    assert not found[len(contexts) :].any()


def test_blocks_are_no_part_of_what_shapes_follow_from():
    scenes = [scene([4], [1], Bucket(2, 1, blocks), window=0) for blocks in (2, 9)]
    first, second = (
        pass_of(*found[:3], [4], [1], Bucket(2, 1, blocks)) for found, blocks in zip(scenes, (2, 9), strict=True)
    )
    assert first.signature == second.signature != pass_of(*scenes[0][:3], [4], [1], Bucket(1, 2, 2)).signature


def test_more_tokens_than_the_bucket_has_are_refused_before_the_kernel_reads_beyond_them():
    cache, tables, slots, *_ = scene([4], [2], Bucket(1, 2, 2), window=0)
    with pytest.raises(StepFailedError, match="room for 2 tokens of a sequence; one brings 3"):
        pass_of(cache, tables, slots, [4], [3], Bucket(1, 2, 2))
