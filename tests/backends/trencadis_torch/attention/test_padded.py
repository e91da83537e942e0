from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from support.backends.dense_attention import dense_attention
from trencadis.records import Bucket, Phase
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.padded import PaddedDecode, PaddedPrefill, flat_block_lists, flat_paged_attention
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

SIZE, HEADS = 4, 4
CPU = torch.device("cpu")


def test_flat_attention_of_the_worked_example():
    """Two sequences, blocks of two tokens, scale 0.5; the numbers are those of the dense softmax."""
    keys = torch.tensor([[0.5, -1.0], [1.5, 9.0], [2.0, 0.25]]).view(3, 2, 1, 1)
    values = torch.tensor([[1.0, 2.0], [3.0, 99.0], [4.0, 5.0]]).view(3, 2, 1, 1)
    groups, usage = torch.tensor([0, 0, 1]), torch.tensor([2, 1, 2])
    found = flat_paged_attention(
        torch.tensor([1.0, 2.0]).view(2, 1, 1, 1),
        keys,
        values,
        mapping=groups[:, None] == torch.arange(2),
        mask=(torch.arange(2) < usage[:, None])[:, None],
        options=AttentionOptions(scale=0.5),
    )
    torch.testing.assert_close(found.flatten(), torch.tensor([2.207851, 4.148047]), atol=1e-6, rtol=0)


def test_block_lists_of_the_worked_example():
    """Block tables [[5, 2], [3]] in a bucket of eight blocks."""
    owners, columns = flat_block_lists(np.array([2, 1], np.int32), num_entries=8)
    assert owners.tolist() == [0, 0, 1, -1, -1, -1, -1, -1]
    tables = [[5, 2], [3]]
    assert [tables[o][c] for o, c in zip(owners[:3], columns[:3], strict=True)] == [5, 2, 3]


def scene(contexts, lengths, bucket, *, window, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spec = AttentionLayer(index=0, num_kv_heads=2, key_dim=8, value_dim=6, window=window, dtype=torch.float32)
    cache = PagedKVCache((spec,), num_blocks=60, block_size=SIZE, device=CPU)
    ends = [c + n for c, n in zip(contexts, lengths, strict=True)]
    tables = torch.randperm(60, generator=generator).view(-1, 10).int()
    whole = [[torch.randn(end, 2, dim, generator=generator) for dim in (8, 6)] for end in ends]
    shape = (bucket.batch_size, bucket.query_len)
    slots = torch.full(shape, cache.padding_block * SIZE)
    query, keys, values = (torch.randn(*shape, h, d, generator=generator) for h, d in ((HEADS, 8), (2, 8), (2, 6)))
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        positions = torch.arange(ends[row])
        place = tables[row, positions // SIZE].long() * SIZE + positions % SIZE
        cache.write(0, place[:context], whole[row][0][:context], whole[row][1][:context])
        slots[row, :length] = place[context:]
        keys[row, :length], values[row, :length] = whole[row][0][context:], whole[row][1][context:]
    return cache, tables, slots.flatten(), (query, keys, values), whole


@pytest.mark.parametrize(
    ("contexts", "lengths", "bucket"),
    [
        ([0], [5], Bucket(1, 5, 0)),
        ([0, 8], [7, 3], Bucket(3, 9, 3)),
        ([13, 4], [2, 6], Bucket(2, 6, 6)),
        ([4, 9, 0], [1, 1, 1], Bucket(5, 1, 12, Phase.DECODE)),
        ([11, 3], [3, 1], Bucket(3, 4, 7, Phase.DECODE)),
        ([17], [1], Bucket(1, 1, 5, Phase.DECODE)),
    ],
)
def test_outputs_follow_the_definition_and_padding_stays_finite(contexts, lengths, bucket):
    for window, options in itertools.product(
        [0, 1, 3, 9], [{}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}]
    ):
        cache, tables, slots, (query, keys, values), whole = scene(contexts, lengths, bucket, window=window)
        arrays = [np.array(part, np.int32) for part in (range(len(contexts)), contexts, lengths)]
        if bucket.phase is Phase.PREFILL:
            extra = bucket.batch_size - len(contexts)
            rows, starts, query_lens = (torch.from_numpy(np.append(part, [0] * extra)).long() for part in arrays)
            kind = PaddedPrefill
        else:
            (rows, starts, query_lens), kind = arrays, PaddedDecode
        one = kind(cache, tables=tables, slots=slots, rows=rows, starts=starts, query_lens=query_lens, bucket=bucket)
        found = one.attend(
            0, *(part.flatten(0, 1) for part in (query, keys, values)), options=AttentionOptions(**options)
        )
        assert found.isfinite().all()
        found = found.view(bucket.batch_size, bucket.query_len, HEADS, 6).double()
        for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
            positions = list(range(context, context + length))
            expected = dense_attention(query[row, :length], *whole[row], positions=positions, window=window, **options)
            torch.testing.assert_close(found[row, :length], expected, atol=1e-5, rtol=0)
