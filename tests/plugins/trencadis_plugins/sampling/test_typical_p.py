from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling import typical_p as module
from trencadis_plugins.sampling.typical_p import TypicalP


def _warp(logits, mass):
    from transformers.generation.logits_process import TypicalLogitsWarper

    return TypicalLogitsWarper(mass)(torch.zeros((1, 1), dtype=torch.int64), logits.double())


def _near(logits, mass):
    """Rows in which a mass, or a tie in distance that rounding makes, decides what stays."""
    distribution = logits.double().log_softmax(-1)
    distance = (distribution + torch.special.entr(distribution.exp()).sum(-1, keepdim=True)).abs()
    values, order = distance.sort()
    cumulative = distribution.exp().gather(1, order).cumsum(-1)
    gaps = values.diff().nan_to_num(nan=1.0)
    return ((cumulative - mass).abs() < 1e-9).any(-1) | ((gaps > 0) & (gaps < 1e-12)).any(-1)


@pytest.mark.representatives(5)
@pytest.mark.parametrize("vocab_size", [8, 100, 3000])
@pytest.mark.parametrize("mass", [0.05, 0.2, 0.5, 0.9, 0.99])
def test_it_keeps_what_transformers_keeps(
    mass, vocab_size, process, start, random_rows, assert_same_distribution, monkeypatch
):
    monkeypatch.setattr(module, "_WIDTHS", (16, 512))
    logits = torch.from_numpy(random_rows(np.random.default_rng(vocab_size + 1), vocab_size, 140))
    changed = process(TypicalP(), logits, [start(row, typical_p=mass) for row in range(140)])
    assert_same_distribution(changed, _warp(logits, mass), _near(logits, mass))


def test_the_most_likely_token_is_dropped_if_it_surprises_too_little(process, start):
    logits = np.log([0.4, 0.15, 0.15, 0.15, 0.15]).tolist()
    changed = process(TypicalP(), [logits], [start(0, typical_p=0.3)])
    assert (changed > -torch.inf).tolist() == [[False, True, True, True, True]]


def test_greedy_rows_do_not_ask(start):
    assert not TypicalP().applies_to(start(0, typical_p=0.3, temperature=0))
