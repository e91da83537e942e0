"""A model in ranks of their own, whole or divided, gives what it gives in the engine's process, and goes on when one of them is killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from support.devices import ON_CUDA
from support.parallel_requests import PROMPTS, answers
from trencadis import LLM, SamplingParams

PROCESSES = {"executor.name": "processes"}
if ON_CUDA:  # two ranks share a device, which NCCL does not let them
    PROCESSES["executor.processes.collective"] = "gloo"
STAGES, TWO = {"parallel.pipeline": 2}, {"parallel.tensor": 2}
DRAFTS = {"speculation.name": "ngram"}
DRAWN = {"speculation.name": "draft_model", "acceptance.name": "token"}
TREES = {"speculation.name": "suffix", "speculation.suffix.tree": True}
SWAP = {"cache.num_blocks": 24, "engine.preemption": "swap"}
PADDED = {"backend.torch.layout": "padded"}
NO_OVERLAP = {"engine.async_scheduling": False}
GLOO = {"executor.processes.collective": "gloo"}
SETUPS = {
    "two": TWO,
    "two stages of two": {**STAGES, **TWO},
    "two stages": STAGES,
    "two stages, one step at a time": {**STAGES, **NO_OVERLAP},
    "two stages, drafts": {**STAGES, **DRAFTS},
    "two stages, drafts in trees": {**STAGES, **TREES},
    "two stages, preemption by swap": {**STAGES, **SWAP},
    "two stages, padded": {**STAGES, **PADDED},
    "two stages, gloo": {**STAGES, **GLOO},
    "three stages": {"parallel.pipeline": 3},
    "two, drafts": {**TWO, **DRAFTS},
    "two, preemption by swap": {**TWO, **SWAP},
    "two, padded": {**TWO, **PADDED},
    "two, gloo": {**TWO, **GLOO},
    "four": {"parallel.tensor": 4},
    "two copies of two": {"parallel.data": 2, **TWO, "engine.placement": "process"},
    "one": {},
    "one, preemption by swap": SWAP,
    "one, drafts": DRAFTS,
    "one, padded": PADDED,
    "one, drafts with a rule": {**DRAFTS, "acceptance.name": "token"},
    "one, drawn drafts": DRAWN,
}


@pytest.fixture(scope="module")
def expected():
    return answers()


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_answers_are_those_of_one_process(expected, setup):
    """A rule with distributions has a say in what is drawn: its answers are those of the same rule in one process."""
    if "acceptance.name" in SETUPS[setup]:
        expected = answers(**SETUPS[setup])
    assert answers(**{**PROCESSES, **SETUPS[setup]}) == expected
    assert not list(Path("/dev/shm").glob(f"trencadis-{os.getpid()}-*"))


@pytest.mark.nightly  # of ranks alone by day: executor/processes/test_losses.py
@pytest.mark.parametrize("divides", ["tensor", "pipeline"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_costs_no_answer(rank, number, divides):
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=5, ignore_eos=True)
    config = {**PROCESSES, f"parallel.{divides}": 2, "observer.names": [], "cache.num_blocks": 128}
    with LLM(**config) as llm:
        executor = llm._frontend.engine.engine._executor
        expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)]
        victim = executor._ranks[rank].pid
        timer = threading.Timer(0.3, os.kill, (victim, number))
        timer.start()
        found = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)]
        timer.join()
        assert found == expected
        assert llm.generate(PROMPTS[:1], params)[0].outputs[0].token_ids == expected[0]
        assert executor._ranks[rank].pid != victim
    assert not list(Path("/dev/shm").glob(f"trencadis-{os.getpid()}-*"))
