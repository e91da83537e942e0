from __future__ import annotations

import numpy as np
import pytest
import torch

from support.backends.dense_attention import dense_attention
from trencadis_torch.attention import ragged
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

SIZE = 4


def scene(contexts, lengths, *, window=0, seed=0, num_blocks=400):
    """Sequences with stored contexts; returns the pass, its new tensors and all keys and values of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    spec = AttentionLayer(index=2, num_kv_heads=2, key_dim=8, value_dim=8, window=window, dtype=torch.float32)
    cache = PagedKVCache((spec,), num_blocks=num_blocks, block_size=SIZE, device=torch.device("cpu"))
    ends = [context + length for context, length in zip(contexts, lengths, strict=True)]
    per_row = max(-(-end // SIZE) for end in ends)
    tables = torch.randperm(num_blocks, generator=generator)[: len(ends) * per_row].view(-1, per_row).int()
    whole = [[torch.randn(end, 2, 8, generator=generator) for _ in range(2)] for end in ends]
    slots = []
    for row, (context, end) in enumerate(zip(contexts, ends, strict=True)):
        positions = torch.arange(end)
        place = tables[row, positions // SIZE].long() * SIZE + positions % SIZE
        cache.write(2, place[:context], whole[row][0][:context], whole[row][1][:context])
        slots.append(place[context:])
    arrays = [np.array(values, np.int32) for values in (range(len(ends)), contexts, lengths)]
    one = RaggedPass(
        cache,
        tables=tables,
        slots=torch.cat(slots),
        rows=arrays[0],
        starts=arrays[1],
        query_lens=arrays[2],
        workspace=Workspace(),
    )
    query = torch.randn(sum(lengths), 4, 8, generator=generator)
    new = [torch.cat([pair[i][c:] for pair, c in zip(whole, contexts, strict=True)]) for i in range(2)]
    return one, query, new, whole


def check(contexts, lengths, **options):
    window = options.get("window", 0)
    one, query, (keys, values), whole = scene(contexts, lengths, **options)
    found = one.attend(2, query, keys, values, options=AttentionOptions())
    first = 0
    for (all_keys, all_values), context, length in zip(whole, contexts, lengths, strict=True):
        positions = list(range(context, context + length))
        part = query[first : first + length]
        expected = dense_attention(part, all_keys, all_values, positions=positions, window=window)
        torch.testing.assert_close(found[first : first + length].double(), expected, atol=1e-5, rtol=0)
        first += length
    return one


@pytest.mark.parametrize("window", [0, 1, 3, 5, 64])
@pytest.mark.parametrize(
    ("contexts", "lengths"),
    [
        ([7, 8, 9, 6], [1, 1, 1, 1]),
        ([0, 50, 3, 11], [1, 1, 1, 1]),
        ([0, 0], [9, 13]),
        ([5, 0, 40], [12, 7, 1]),
        ([9, 20, 9], [3, 3, 2]),
    ],
    ids=["even decodes", "uneven decodes", "whole prompts", "mixed", "drafts"],
)
def test_outputs_follow_the_definition(contexts, lengths, window):
    check(contexts, lengths, window=window)


def test_long_chunk_is_cut_into_pieces(monkeypatch):
    monkeypatch.setattr(ragged, "MAX_PIECE", 5)
    one = check([6, 0], [18, 17], window=7)
    sizes = sorted((group.query_len, group.num_pieces) for group in one._groups[7])
    assert sizes == [(2, 1), (3, 1), (5, 1), (5, 5)]


def test_gathered_keys_are_bounded(monkeypatch):
    monkeypatch.setattr(ragged, "MAX_GATHERED", 48)
    one = check([15] * 7, [1] * 7)
    assert [group.num_pieces for group in one._groups[0]] == [3, 3, 1]


def test_unlike_contexts_share_no_group():
    one = check([4, 400, 5, 390], [1, 1, 1, 1], num_blocks=600)
    assert sorted(group.num_keys for group in one._groups[0]) == [6, 401]


def test_decodes_alike_need_no_gathering_of_queries():
    one = check([7, 8, 9], [1, 1, 1])
    (group,) = one._groups[0]
    assert group.tokens == slice(0, 3)


def test_window_reads_no_block_outside_it():
    one = check([200], [1], window=9)
    (group,) = one._groups[9]
    assert len(group.blocks) == 3


def test_workspace_is_used_again_and_grows():
    workspace, source = Workspace(), torch.arange(12.0).view(6, 2)
    first = workspace.gather("keys", source, torch.tensor([1, 3]))
    again = workspace.gather("keys", source, torch.tensor([5]))
    assert again.data_ptr() == first.data_ptr()
    assert again.tolist() == [[10.0, 11.0]]
    assert workspace.gather("keys", source, torch.arange(6)).tolist() == source.tolist()
