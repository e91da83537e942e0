from __future__ import annotations

import torch

from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa
from trencadis_gaudi.attention.prefill import attend_prefill, batch_mask, merged_mask, with_context
from trencadis_gaudi.flat_cache import FlatLayer
from trencadis_torch.attention.options import AttentionOptions


def rows(mask):
    return ["".join(".x"[int(seen)] for seen in row) for row in mask[:, 0].flatten(0, 1)]


def test_batch_mask_shows_context_below_the_start_and_new_keys_up_to_the_query():
    mask = batch_mask(torch.tensor([3, 0]), torch.tensor([2, 1]), num_context=4, query_len=2, window=0)
    assert rows(mask) == ["xxx.x.", "xxx.xx", "....x.", "....xx"]


def test_window_hides_what_is_far_and_padding_sees_itself():
    mask = batch_mask(torch.tensor([3, 0]), torch.tensor([2, 0]), num_context=4, query_len=2, window=2)
    assert rows(mask) == ["..x.x.", "....xx", "....x.", ".....x"]


def test_merged_mask_keeps_sequences_apart():
    """Context: a block of sequence 1 with one of two slots filled, and padding. New: two of sequence 0, one of 1, padding."""
    mask = merged_mask(
        torch.tensor([0, 0, 1, -1]),
        torch.tensor([0, 1, 1, 0]),
        torch.tensor([1, -1]),
        torch.tensor([0, 0]),
        torch.tensor([1, 1]),
        block_size=2,
        window=0,
    )
    assert rows(mask) == ["....x...", "....xx..", "x.....x.", ".......x"]


def test_merged_mask_counts_a_window_within_each_sequence():
    mask = merged_mask(
        torch.tensor([1, 0, 0]),
        torch.tensor([4, 0, 1]),
        torch.tensor([1, 1]),
        torch.tensor([0, 1]),
        torch.tensor([2, 2]),
        block_size=2,
        window=2,
    )
    assert rows(mask) == ["...xx..", ".....x.", ".....xx"]


def test_context_stands_in_front_of_new_keys():
    cached = torch.arange(6.0).view(6, 1, 1)
    layer = FlatLayer(cached, cached + 0.5, block_size=2, window=0)
    new = torch.tensor([[10.0], [20.0]]).view(2, 1, 1, 1)
    keys, values = with_context(layer, torch.tensor([[2], [0]]), new, new + 0.5)
    assert keys.flatten(1).tolist() == [[4, 5, 10], [0, 1, 20]]
    assert torch.equal(values, keys + 0.5)
    assert with_context(layer, torch.empty(2, 0, dtype=torch.long), new, keys) == (new, keys)


def test_kernel_is_used_where_it_can_do_the_work_only():
    calls = []

    def kernel(*args):
        calls.append(args)
        return emulated_fused_sdpa(*args)

    generator = torch.Generator().manual_seed(1)
    query, keys = (torch.randn(1, 4, heads, 8, generator=generator) for heads in (4, 2))
    common = {"mask": None, "query_lens": torch.tensor([4])}
    options = {**common, "options": AttentionOptions()}
    plain = attend_prefill(query, keys, keys, **options, kernel=None)
    fused = attend_prefill(query, keys, keys, **options, kernel=kernel)
    torch.testing.assert_close(plain, fused, atol=1e-5, rtol=0)
    assert len(calls) == 1
    attend_prefill(query, keys, keys, **common, options=AttentionOptions(softcap=2.0), kernel=kernel)
    attend_prefill(query, keys, keys, **common, options=AttentionOptions(sinks=torch.zeros(4)), kernel=kernel)
    attend_prefill(query, keys, keys[..., :6], **options, kernel=kernel)
    assert len(calls) == 1
