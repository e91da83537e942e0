from __future__ import annotations

import pytest
import torch

from support.backends.dense_attention import dense_attention
from trencadis_torch.attention import whole_texts
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.cache.kv_cache import AttentionLayer


def check(lengths, window, **options):
    generator = torch.Generator().manual_seed(len(lengths))
    layer = AttentionLayer(index=3, num_kv_heads=2, key_dim=8, value_dim=6, window=window, dtype=torch.float32)
    total = sum(lengths)
    query = torch.randn(total, 4, 8, generator=generator)
    keys = torch.randn(total, 2, 8, generator=generator)
    values = torch.randn(total, 2, 6, generator=generator)
    found = WholeTexts((layer,), lengths).attend(3, query, keys, values, options=AttentionOptions(**options))
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        expected = dense_attention(
            query[part], keys[part], values[part], positions=list(range(length)), window=window, **options
        )
        torch.testing.assert_close(found[part].double(), expected, atol=1e-5, rtol=0)
        first += length


@pytest.mark.parametrize("window", [0, 1, 3, 5, 64])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [4], [2, 5, 5, 5, 9], [9, 1, 9]], ids=str)
def test_each_text_sees_itself_alone_from_its_beginning(lengths, window):
    check(lengths, window)


@pytest.mark.parametrize("window", [0, 4])
def test_scale_soft_caps_and_sinks_are_the_layers(window):
    check([1, 7, 7], window, scale=0.2, softcap=1.5, sinks=torch.tensor([0.1, -0.4, 0.8, 0.0]))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_pieces_of_long_texts_meet_without_a_seam(monkeypatch, window):
    monkeypatch.setattr(whole_texts, "MAX_PIECE", 4)
    check([3, 19, 19], window)
