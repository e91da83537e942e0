from __future__ import annotations

import math

import pytest
import torch

from trencadis_gaudi.attention import unified as unified_attention
from trencadis_gaudi.attention.flat import FLOOR
from trencadis_gaudi.attention.unified import Part, block_part, causal_part, dense_part, merge_parts, sink_part
from trencadis_torch.attention.options import AttentionOptions


def numbers(*values):
    return torch.tensor(values).view(-1, 1, 1)


def part_of(scores, values):
    """One token over keys whose scores are given: query 1, keys = scores, scale 1."""
    return dense_part(
        torch.ones(1, 1, 1),
        numbers(*scores),
        numbers(*values),
        seen=torch.ones(1, len(scores), dtype=torch.bool),
        options=AttentionOptions(scale=1.0),
    )


WORKED = [
    (([0.0, 1.0], [1.0, 2.0]), (2.367879, 1.0, 1.367879)),
    (([2.0], [3.0]), (3.0, 2.0, 1.0)),
    (([-1.0, 0.5], [4.0, 5.0]), (5.892521, 0.5, 1.223130)),
]


def test_parts_and_merge_of_the_worked_example():
    parts = [part_of(*given) for given, _ in WORKED]
    for part, (_, expected) in zip(parts, WORKED, strict=True):
        assert [tensor.item() for tensor in part] == pytest.approx(expected, abs=1e-6)
    assert merge_parts(parts).item() == pytest.approx(2.919768, abs=1e-6)
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    whole = scores.softmax(0) @ torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert merge_parts(parts).item() == pytest.approx(whole.item(), abs=1e-6)


def test_token_that_sees_nothing_yields_zero():
    empty = Part(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), FLOOR), torch.zeros(1, 1, 1))
    assert merge_parts([empty]).item() == 0
    full = part_of([2.0], [3.0])
    assert merge_parts([empty, full, empty]).item() == 3


def test_sink_is_one_more_score_without_a_value():
    part = part_of([0.0, 1.0], [1.0, 2.0])
    merged = merge_parts([part, sink_part(torch.tensor([0.5]), part)]).item()
    total = 1 + math.e + math.exp(0.5)
    assert merged == pytest.approx((1 + 2 * math.e) / total, abs=1e-6)


def test_part_of_blocks_equals_the_part_of_their_tokens():
    generator = torch.Generator().manual_seed(5)
    query, keys, values = (torch.randn(s, generator=generator) for s in ((3, 4, 8), (4, 2, 2, 8), (4, 2, 2, 6)))
    owners, usage = torch.tensor([2, -1, 0, 2]), torch.tensor([2, 0, 1, 9])
    skipped = torch.tensor([1, 0, 0, -3])
    options = AttentionOptions(scale=0.4, softcap=1.5)
    found = block_part(query, keys, values, owners=owners, usage=usage, skipped=skipped, options=options)
    seen = torch.zeros(3, 8, dtype=torch.bool)
    seen[2, [1, 6, 7]] = seen[0, 4] = True
    expected = dense_part(query, keys.flatten(0, 1), values.flatten(0, 1), seen=seen, options=options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 2])
def test_slices_of_queries_do_not_change_the_causal_part(window, monkeypatch):
    generator = torch.Generator().manual_seed(6)
    query, keys, values = (torch.randn(7, heads, 8, generator=generator) for heads in (4, 2, 2))
    owners, positions = torch.tensor([0, 1, 1, 1, -1, 2, 2]), torch.tensor([5, 0, 1, 2, 0, 3, 4])

    def run():
        return causal_part(
            query, keys, values, owners=owners, positions=positions, window=window, options=AttentionOptions(scale=0.3)
        )

    whole = run()
    seen = (owners[:, None] == owners) & (owners >= 0) & (positions <= positions[:, None])
    if window:
        seen &= positions > positions[:, None] - window
    expected = dense_part(query, keys, values, seen=seen, options=AttentionOptions(scale=0.3))
    monkeypatch.setattr(unified_attention, "QUERY_SLICE", 3)
    for one, two, three in zip(whole, run(), expected, strict=True):
        torch.testing.assert_close(one, three, atol=1e-6, rtol=0)
        torch.testing.assert_close(two, three, atol=1e-6, rtol=0)
