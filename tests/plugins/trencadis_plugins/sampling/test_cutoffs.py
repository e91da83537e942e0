from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.cutoffs import EpsilonCutoff, EtaCutoff

_NO_IDS = torch.zeros((1, 1), dtype=torch.int64)


def _warper(name, value):
    from transformers.generation import logits_process

    return getattr(logits_process, name)(value)


@pytest.mark.parametrize("vocab_size", [8, 100, 2000])
@pytest.mark.parametrize("cutoff", [1e-4, 3e-3, 0.05, 0.4, 0.99])
def test_epsilon_keeps_what_transformers_keeps(
    cutoff, vocab_size, process, start, random_rows, assert_same_distribution
):
    logits = torch.from_numpy(random_rows(np.random.default_rng(vocab_size), vocab_size, 140))
    changed = process(EpsilonCutoff(), logits, [start(row, epsilon_cutoff=cutoff) for row in range(140)])
    expected = _warper("EpsilonLogitsWarper", cutoff)(_NO_IDS, logits.double())
    assert_same_distribution(changed, expected, ((logits.double().softmax(-1) - cutoff).abs() < 1e-12).any(-1))


@pytest.mark.parametrize("vocab_size", [8, 100, 2000])
@pytest.mark.parametrize("cutoff", [1e-4, 3e-3, 0.05, 0.4, 0.99])
def test_eta_keeps_what_transformers_keeps(cutoff, vocab_size, process, start, random_rows, assert_same_distribution):
    logits = torch.from_numpy(random_rows(np.random.default_rng(vocab_size), vocab_size, 140)).double()
    changed = process(EtaCutoff(), logits, [start(row, eta_cutoff=cutoff) for row in range(140)])
    expected = _warper("EtaLogitsWarper", cutoff)(_NO_IDS, logits)
    distribution = logits.softmax(-1)
    eta = torch.special.entr(distribution).sum(-1, keepdim=True).neg().exp().mul(cutoff**0.5).clamp(max=cutoff)
    # transformers holds epsilon as float32.
    assert_same_distribution(changed, expected, ((distribution / eta - 1).abs() < 1e-6).any(-1))


def test_the_most_likely_tokens_stay_whatever_the_cutoff(process, start):
    for processor, params in ((EpsilonCutoff(), {"epsilon_cutoff": 0.9}), (EtaCutoff(), {"eta_cutoff": 0.9})):
        changed = process(processor, [[1.0, 2.0, 2.0, 0.0]], [start(0, **params)])
        assert (changed > -torch.inf).tolist() == [[False, True, True, False]]
