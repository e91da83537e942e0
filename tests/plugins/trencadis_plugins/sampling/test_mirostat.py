from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.interfaces import SamplingContext
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.mirostat import Mirostat
from trencadis_plugins.sampling.standard import StandardSampler


def _distribution(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _sampler():
    sampler = StandardSampler(standard_chain("vllm"))
    sampler.allocate(num_rows=4, vocab_size=50, device=torch.device("cpu"))
    return sampler


def _write(sampler, logits, *, row=0, first=0, tokens=None):
    tokens = torch.zeros((4, 400), dtype=torch.int32) if tokens is None else tokens
    text = []
    for place, one in enumerate(logits, start=first):
        context = SamplingContext(rows=(row,), positions=(place,), tokens=tokens)
        text.append(int(sampler.sample(one[None].clone(), context).token_ids))
        tokens[row, place + 1] = text[-1]
    return text


@pytest.mark.parametrize(("tau", "eta"), [(1.0, 0.5), (3.0, 0.1), (2.0, 1.0)])
def test_cuts_follow_the_feedback_loop_of_the_definition(tau, eta, start):
    processor = Mirostat()
    processor.allocate(num_rows=2, vocab_size=50, device=torch.device("cpu"))
    processor.start_row(start(1, mirostat_mode=2, mirostat_tau=tau, mirostat_eta=eta))
    rng, mu, cuts = np.random.default_rng(2), 2 * tau, set()
    for place in range(300):
        logits = rng.normal(0, 1.5, 50).astype(np.float32)
        context = SamplingContext(rows=(1,), positions=(place,), tokens=torch.zeros((2, 400), dtype=torch.int32))
        changed = processor.apply(torch.from_numpy(logits[None].copy()), context)[0].numpy()
        kept = (-np.log2(_distribution(logits.astype(np.float64))) <= mu) | (logits == logits.max())
        assert np.array_equal(np.isfinite(changed), kept)
        distribution = _distribution(np.where(kept, logits, -np.inf).astype(np.float64))
        token = int(rng.choice(50, p=distribution))
        processor.commit(torch.tensor([token]), context)
        mu -= eta * (-np.log2(distribution[token]) - tau)
        cuts.add(int(kept.sum()))
    assert len(cuts) > 5


def test_a_preempted_sequence_goes_on_with_its_own_state(start):
    params = {"row_seed": 5, "mirostat_mode": 2, "mirostat_tau": 1.5, "mirostat_eta": 0.7}
    logits = torch.randn((60, 50), generator=torch.Generator().manual_seed(1))
    straight = _sampler()
    straight.start_row(start(0, **params))
    expected = _write(straight, logits)
    fresh_rest = []
    for given_away in (False, True):
        sampler, tokens = _sampler(), torch.zeros((4, 400), dtype=torch.int32)
        sampler.start_row(start(0, **params))
        text = _write(sampler, logits[:30], tokens=tokens)
        if given_away:
            sampler.start_row(start(0, row_seed=9, mirostat_mode=2))
        tokens[2] = tokens[0]
        sampler.start_row(start(2, [0], text, **params))
        assert text + _write(sampler, logits[30:], row=2, first=30, tokens=tokens) == expected
        without = _sampler()
        without.start_row(start(2, [0], text, **params))
        fresh_rest.append(_write(without, logits[30:], row=2, first=30, tokens=tokens))
    assert fresh_rest[0] != expected[30:]
