"""A rank in a process of its own gives what the same rank in the engine's process does."""

from __future__ import annotations

import pytest

from support.parallel_requests import answers

SETUPS = {
    "plain": {},
    "preemption by swap": {"cache.num_blocks": 24, "engine.preemption": "swap"},
    "drafts": {"speculation.name": "ngram"},
    "drafts with a rule": {"speculation.name": "ngram", "acceptance.name": "token"},
    "padded": {"backend.torch.layout": "padded"},
    "drawn drafts": {"speculation.name": "draft_model", "acceptance.name": "token"},
}


@pytest.mark.nightly  # two ranks: test_tensor.py
@pytest.mark.parametrize("setup", SETUPS)
def test_answers_are_those_of_the_engines_own_process(setup):
    own, other = (answers(**{"executor.name": name}, **SETUPS[setup]) for name in ("inline", "processes"))
    assert own == other
