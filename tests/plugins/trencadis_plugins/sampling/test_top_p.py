from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.records import SamplingParams
from trencadis_plugins.sampling import top_p as module
from trencadis_plugins.sampling.top_p import TopP


def _kept(row):
    return np.flatnonzero(np.isfinite(np.asarray(row))).tolist()


@pytest.mark.representatives(100)
@pytest.mark.parametrize(
    ("logits", "p", "kept"),
    [
        *(
            ([1.0] * 4, p, list(range(number)))
            for p, number in ((0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4))
        ),
        ([0.0, 3.0, 3.0], 1e-12, [1]),
    ],
)
def test_equal_tokens_are_dropped_from_the_highest_id_at_exact_boundaries(logits, p, kept, process, start):
    assert _kept(process(TopP(), [logits], [start(0, top_p=p)])[0]) == kept


@pytest.mark.parametrize("scale", [0.0, 0.001, 1.0, 3.0, 20.0])
def test_every_width_of_the_partial_selection_equals_the_definition(scale, process, start, reference_distribution):
    rng = np.random.default_rng(7)
    logits = (rng.normal(0, 1, (12, 6000)) * scale).astype(np.float32)
    logits[1::3] = np.round(logits[1::3])
    logits[2::3, rng.random(6000) < 0.5] = -np.inf
    shares = [0.05, 0.3, 0.6, 0.9, 0.99, 0.999] * 2
    processed = process(TopP(), logits, [start(row, top_p=p) for row, p in enumerate(shares)])
    num_compared = 0
    for row, p, result in zip(logits, shares, processed, strict=True):
        distribution, margin = reference_distribution(row, "vllm", SamplingParams(top_p=p))
        if scale == 0 or margin > 1e-7:
            assert _kept(result) == np.flatnonzero(distribution).tolist()
            num_compared += 1
    assert num_compared >= 8


def test_a_sharp_row_is_not_sorted(process, start, monkeypatch):
    widths = []
    largest = module._largest

    def recorded(logits, width):
        widths.append((len(logits), width))
        return largest(logits, width)

    monkeypatch.setattr(module, "_largest", recorded)
    sharp = torch.cat([torch.tensor([30.0]), torch.zeros(8191)]).tolist()
    wide = [*([9.0] * 500), *([0.0] * 7692)]
    process(TopP(), [sharp, wide, sharp], [start(row, top_p=0.9) for row in range(3)])
    assert widths == [(3, 64), (1, 512)]


def test_sorting_everything_as_on_an_accelerator_keeps_the_same_tokens(process, start, monkeypatch):
    logits = torch.randn((40, 1000), generator=torch.Generator().manual_seed(0)).mul(4).round()
    starts = [start(row, top_p=0.02 + row / 41) for row in range(40)]
    expected = process(TopP(), logits, starts)
    monkeypatch.setattr(module, "_widths", lambda logits: [logits.shape[1]])
    assert torch.equal(process(TopP(), logits, starts), expected)
