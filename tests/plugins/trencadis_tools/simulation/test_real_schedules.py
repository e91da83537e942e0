"""A simulated device and a real one are asked for the same steps: same requests, same numbers of tokens."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest

from support.core.fake_engine import VOCAB_SIZE
from support.simulation import STEP_TIMES
from trencadis.api import build_engine, load_with_plugins
from trencadis.clock import SimulatedClock
from trencadis.records import Request, SamplingParams
from trencadis_tools.simulation.executor import SimulatedExecutor

NUM_REQUESTS = 24
TABLES: dict[str, dict[str, Any]] = {
    "model": {"path": "demo"},
    "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 48, "warmup": False},
    "cache": {"num_blocks": 40, "block_size": 4},
    "scheduling": {"name": "fcfs", "fallback": ""},
    "observer": {"names": []},
}


def requests() -> list[tuple[int, Request]]:
    """Requests with shared heads, and the step before which each is added; each has its index for a seed."""
    draws, made, step = random.Random(3), [], 0
    for index in range(NUM_REQUESTS):
        step += draws.randrange(0, 5)
        head = [2 + index % 3] * 10
        prompt = [*head, *(draws.randrange(2, VOCAB_SIZE) for _ in range(draws.randrange(1, 50)))]
        params = SamplingParams(max_tokens=draws.randrange(1, 20), ignore_eos=True, seed=index)
        made.append((step, Request(request_id=str(index), prompt_token_ids=tuple(prompt), params=params)))
    return made


def steps_of(engine, executor) -> list[list[tuple[int, int, int]]]:
    """Return what a device was asked for in each step: request, first position and number of tokens of each sequence."""
    submit, whose, steps = executor.submit, {}, []

    def note(batch):
        whose.update((start.row, start.params.seed) for start in batch.row_starts)
        rows = [
            (whose[row], start, length)
            for one in batch.passes
            for row, start, length in zip(one.rows.tolist(), one.starts.tolist(), one.query_lens.tolist(), strict=True)
        ]
        steps.append(sorted(rows))
        return submit(batch)

    executor.submit = note
    left = requests()
    while left or engine.has_work:
        while left and left[0][0] <= len(steps):
            engine.add(left.pop(0)[1])
        engine.step()
        if left and not engine.has_work:
            left[0] = (0, left[0][1])
    engine.close()
    return steps


def simulated_steps(config, registry) -> list[list[tuple[int, int, int]]]:
    clock = SimulatedClock()
    lengths = [request.params.max_tokens for _, request in requests()]
    executor = SimulatedExecutor(clock, STEP_TIMES, lengths, max_model_len=128, vocab_size=VOCAB_SIZE)
    return steps_of(build_engine(config, registry=registry, clock=clock, executor=executor), executor)


def real_steps(config, registry) -> list[list[tuple[int, int, int]]]:
    engine = build_engine(config, registry=registry)
    return steps_of(engine, engine._executor)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_engine_on_a_fake_model_makes_the_steps_of_the_simulated_device(fake_house, overlaps):
    config, registry = fake_house(max_model_len=128)
    engine = attrs.evolve(config.engine, max_num_seqs=4, max_num_batched_tokens=48, async_scheduling=overlaps)
    config = attrs.evolve(config, engine=engine, cache=attrs.evolve(config.cache, num_blocks=40))
    steps = simulated_steps(config, registry)
    assert steps == real_steps(config, registry)
    assert sum(length for step in steps for _, _, length in step) > 500


@pytest.mark.release
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_engine_on_torch_makes_the_steps_of_the_simulated_device(overlaps):
    tables = TABLES | {"engine": {**TABLES["engine"], "async_scheduling": overlaps}, "backend": {"name": "torch"}}
    resolved, registry = load_with_plugins(environ={}, overrides=tables)
    config = attrs.evolve(resolved.config, model=attrs.evolve(resolved.config.model, max_model_len=128))
    assert simulated_steps(config, registry) == real_steps(config, registry)
