from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.records import Bucket, Phase
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.padded import PaddedDecode, StaticFlatDecode, StaticKernelPass, static_decode
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

SIZE = 4
CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [0, 3, 9])
@pytest.mark.parametrize(
    ("rows", "starts", "lengths", "bucket"),
    [
        ([2, 0, 3], [4, 9, 0], [1, 1, 1], Bucket(5, 1, 12, Phase.DECODE)),
        ([1, 2], [11, 3], [3, 1], Bucket(3, 4, 7, Phase.DECODE)),
        ([3], [17], [1], Bucket(1, 1, 5, Phase.DECODE)),
        ([], [], [], Bucket(2, 2, 3, Phase.DECODE)),
    ],
)
def test_lists_made_on_the_device_are_those_of_the_host(rows, starts, lengths, bucket, window):
    generator = torch.Generator().manual_seed(0)
    layer = AttentionLayer(index=0, num_kv_heads=2, key_dim=8, value_dim=6, window=window, dtype=torch.float32)
    cache = PagedKVCache((layer,), num_blocks=40, block_size=SIZE, device=CPU)
    for part in cache.parts:
        part.normal_(generator=generator)
    tables = torch.randperm(40, generator=generator).view(4, 10).int()
    arrays = [np.array(part, np.int32) for part in (rows, starts, lengths)]
    facts = np.zeros((3, bucket.batch_size), np.int64)
    facts[:, : len(rows)] = arrays
    slots = torch.arange(bucket.num_tokens) % SIZE + cache.padding_block * SIZE
    new = [torch.randn(bucket.num_tokens, h, d, generator=generator) for h, d in ((4, 8), (2, 8), (2, 6))]
    options = AttentionOptions()
    host = PaddedDecode(
        cache, tables=tables, slots=slots, rows=arrays[0], starts=arrays[1], query_lens=arrays[2], bucket=bucket
    )
    device = static_decode(torch.from_numpy(facts), bucket, slots=slots, tables=tables, cache=cache)
    assert isinstance(device, StaticFlatDecode)
    expected = host.attend(0, *new, options=options).unflatten(0, (bucket.batch_size, bucket.query_len))
    found = device.attend(0, *new, options=options).unflatten(0, (bucket.batch_size, bucket.query_len))
    assert found.isfinite().all()
    for row, length in enumerate(lengths):
        assert torch.equal(found[row, :length], expected[row, :length])


def test_padding_of_a_kernel_pass_yields_nothing():
    class Half:
        """Writes what it is given for the first token alone."""

        def attend(self, layer_index, query, keys, values, *, output, options):
            output[0] = layer_index

    one = StaticKernelPass(Half())
    found = one.attend(7, torch.ones(2, 3, 4), torch.ones(2, 1, 4), torch.ones(2, 1, 5), options=AttentionOptions())
    assert found.shape == (2, 3, 5)
    assert found[0].eq(7).all()
    assert found[1].eq(0).all()
