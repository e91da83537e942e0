"""Errors of rows on a device that is not waited for: known when the step is done, and the same as where the host looks at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.devices import DEVICE, cuda_only
from trencadis_plugins.sampling import guard
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.greedy import GreedySampler
from trencadis_plugins.sampling.standard import StandardSampler

VOCAB_SIZE = 600
SAMPLERS = {"standard": lambda: StandardSampler(standard_chain("vllm")), "greedy": GreedySampler}


@pytest.fixture
def is_later(monkeypatch):
    """``is_later(flag)`` makes the CPU a device that is read later."""
    return lambda flag: monkeypatch.setattr(guard, "_is_read_later", lambda peaks: flag)


def sampled(sampler, logits, starts, context_of, device="cpu"):
    sampler.allocate(num_rows=8, vocab_size=VOCAB_SIZE, device=torch.device(device))
    for one in starts:
        sampler.start_row(one)
    context = context_of(starts)
    if device != "cpu":
        import attrs

        context = attrs.evolve(context, tokens=context.tokens.to(device))
    return sampler.sample(torch.from_numpy(logits.copy()).to(device), context)


def rows(start, *, greedy):
    """Sequences, and logits, of which two rows are damaged."""
    params = {"temperature": 0.0} if greedy else {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
    logits = np.random.default_rng(0).normal(0, 3, (4, VOCAB_SIZE)).astype(np.float32)
    logits[1, 7], logits[3, 9] = np.nan, np.inf
    return [start(row, (1, 2, 3), row_seed=row, **params) for row in range(4)], logits


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("name", "greedy"), [("standard", True), ("greedy", True), ("standard", False)])
def test_late_errors_are_those_of_a_host_that_looks_at_once(is_later, start, context_of, name, greedy):
    starts, logits = rows(start, greedy=greedy)
    is_later(False)
    expected = sampled(SAMPLERS[name](), logits, starts, context_of)
    assert [error.index for error in expected.row_errors] == [1, 3]
    assert expected.late_errors is None
    is_later(True)
    found = sampled(SAMPLERS[name](), logits, starts, context_of)
    assert found.row_errors == ()
    assert found.late_errors() == expected.row_errors
    assert found.token_ids[[0, 2]].tolist() == expected.token_ids[[0, 2]].tolist()
    assert bool(((found.token_ids >= 0) & (found.token_ids < VOCAB_SIZE)).all())


def test_a_row_that_was_refused_is_named_at_once_and_not_again(is_later, start, context_of):
    is_later(True)
    sampler = SAMPLERS["standard"]()
    starts, logits = rows(start, greedy=True)
    sampler._refused = {}
    original = sampler.start_row

    def refused(one):
        original(one)
        if one.row == 1:
            sampler._refused[1] = ValueError("no such thing")

    sampler.start_row = refused
    found = sampled(sampler, logits, starts, context_of)
    assert [(error.index, error.message) for error in found.row_errors] == [(1, "no such thing")]
    assert [error.index for error in found.late_errors()] == [3]


@cuda_only
@pytest.mark.parametrize("greedy", [True, False])
def test_a_cuda_device_is_not_waited_for(start, context_of, greedy):
    starts, logits = rows(start, greedy=greedy)
    sampler, host = SAMPLERS["standard"](), SAMPLERS["standard"]()
    sampled(sampler, logits, starts, context_of, DEVICE)  # compiles and allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        context = context_of(starts)
        found = sampler.sample(torch.from_numpy(logits).pin_memory().to(DEVICE, non_blocking=True), _there(context))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = sampled(host, logits, starts, context_of)
    assert found.late_errors() == expected.row_errors
    assert found.token_ids[[0, 2]].tolist() == expected.token_ids[[0, 2]].tolist()


def _there(context):
    import attrs

    return attrs.evolve(context, tokens=context.tokens.pin_memory().to(DEVICE, non_blocking=True))
