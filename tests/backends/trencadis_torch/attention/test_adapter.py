from __future__ import annotations

from types import SimpleNamespace

import torch

from support.backends import tiny_models
from trencadis_torch.attention import adapter


class Pass:
    def attend(self, layer_index, query, keys, values, *, options):
        self.seen = (layer_index, tuple(query.shape), tuple(keys.shape), tuple(values.shape), options)
        return query[..., : values.shape[-1]]


def test_attention_is_the_pass_that_came_with_the_forward():
    one, module = Pass(), SimpleNamespace(layer_idx=3)
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 6)
    output, weights = adapter.paged_attention(
        module, query, key, value, None, trencadis_pass=one, scaling=0.5, softcap=2.0, sliding_window=9, dropout=0.0
    )
    *seen, options = one.seen
    assert seen == [3, (5, 4, 8), (5, 2, 8), (5, 2, 6)]
    assert (options.scale, options.softcap, options.sinks) == (0.5, 2.0, None)
    assert output.shape == (1, 5, 4, 6)
    assert torch.equal(output[0, :, 1], query[0, 1, :, :6])
    assert weights is None


def test_model_is_switched_and_back():
    adapter.register()
    adapter.register()
    model = tiny_models.make_model("llama")
    assert adapter.switch(model, adapter.PAGED)
    assert model.config._attn_implementation == adapter.PAGED
    assert adapter.switch(model, "eager")
