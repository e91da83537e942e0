from __future__ import annotations

import torch

from trencadis_plugins.sampling.temperature import Temperature


def test_logits_are_divided_row_by_row(process, start):
    starts = [start(0, temperature=0.5), start(1), start(2, temperature=100.0), start(3, temperature=0.0)]
    processed = process(Temperature(), [[1, -2]] * 4, starts)
    assert torch.allclose(processed, torch.tensor([[2, -4], [1, -2], [0.01, -0.02], [1, -2]]))
    assert torch.equal(processed[[1, 3]], torch.tensor([[1.0, -2.0]] * 2))
