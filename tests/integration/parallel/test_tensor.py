"""A model that is divided over processes gives what it gives in one, and goes on when one of them is killed."""

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
SETUPS = {
    "two stages": {"parallel.pipeline": 2},
    "two stages, one step at a time": {"parallel.pipeline": 2, "engine.async_scheduling": False},
    "two stages, drafts": {"parallel.pipeline": 2, "speculation.name": "ngram"},
    "two stages, drafts in trees": {
        "parallel.pipeline": 2,
        "speculation.name": "suffix",
        "speculation.suffix.tree": True,
    },
    "two stages, preemption by swap": {
        "parallel.pipeline": 2,
        "cache.num_blocks": 24,
        "engine.preemption": "swap",
    },
    "two stages, padded": {"parallel.pipeline": 2, "backend.torch.layout": "padded"},
    "two stages, gloo": {"parallel.pipeline": 2, "executor.processes.collective": "gloo"},
    "three stages": {"parallel.pipeline": 3},
    "two": {"parallel.tensor": 2},
    "two, drafts": {"parallel.tensor": 2, "speculation.name": "ngram"},
    "two, preemption by swap": {"parallel.tensor": 2, "cache.num_blocks": 24, "engine.preemption": "swap"},
    "two, padded": {"parallel.tensor": 2, "backend.torch.layout": "padded"},
    "two, gloo": {"parallel.tensor": 2, "executor.processes.collective": "gloo"},
    "four": {"parallel.tensor": 4},
    "two stages of two": {"parallel.pipeline": 2, "parallel.tensor": 2},
    "two copies of two": {"parallel.data": 2, "parallel.tensor": 2, "engine.placement": "process"},
}


@pytest.fixture(scope="module")
def expected():
    return answers()


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_answers_are_those_of_one_process(expected, setup):
    found = answers(**{**PROCESSES, **SETUPS[setup]})
    assert found == expected
    assert not list(Path("/dev/shm").glob(f"trencadis-{os.getpid()}-*"))


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("divides", ["tensor", "pipeline"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_costs_no_answer(rank, number, divides):
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=5, ignore_eos=True)
    config = {**PROCESSES, f"parallel.{divides}": 2, "observer.names": [], "cache.num_blocks": 128}
    with LLM(**config) as llm:
        executor = _executor(llm)
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


def _executor(llm):
    return llm._frontend.engine.engine._executor
