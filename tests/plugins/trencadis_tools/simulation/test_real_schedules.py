"""A simulated device and a real one are asked for the same steps: same requests, same numbers of tokens."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest

from support.core.fake_engine import VOCAB_SIZE
from support.simulation import STEP_TIMES
from trencadis.api import build_engine, load_with_plugins
from trencadis.clock import SimulatedClock
from trencadis.records import Request, SamplingParams
from trencadis_plugins.speculation.config import NgramConfig
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.fakes import fake_text
from trencadis_tools.simulation.drafts import simulated_speculation
from trencadis_tools.simulation.executor import SimulatedExecutor

NUM_REQUESTS = 24
TABLES: dict[str, dict[str, Any]] = {
    "model": {"path": "demo"},
    "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 48, "warmup": False},
    "cache": {"num_blocks": 40, "block_size": 4},
    "scheduling": {"name": "fcfs", "fallback": ""},
    "observer": {"names": []},
}


def requests(repeats: bool = False) -> list[tuple[int, Request]]:
    """Requests with shared heads, and the step before which each is added; each has its index for a seed.

    Args:
        repeats: Prompts repeat themselves, so that n-grams find something, and answers are greedy.
    """
    draws, made, step = random.Random(3), [], 0
    for index in range(NUM_REQUESTS):
        step += draws.randrange(0, 5)
        head = [2 + index % 3] * 10
        prompt = [*head, *(draws.randrange(2, VOCAB_SIZE) for _ in range(draws.randrange(1, 50)))]
        params = SamplingParams(max_tokens=draws.randrange(1, 20), ignore_eos=True, seed=index)
        if repeats:
            prompt = (prompt[8:14] * 10)[: len(prompt)]
            params = attrs.evolve(params, max_tokens=params.max_tokens + 20, temperature=0.0)
        made.append((step, Request(request_id=str(index), prompt_token_ids=tuple(prompt), params=params)))
    return made


def steps_of(engine, executor, repeats: bool = False) -> list[list[tuple[int, int, int]]]:
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
    left = requests(repeats)
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


@pytest.mark.nightly
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_engine_on_torch_makes_the_steps_of_the_simulated_device(overlaps):
    tables = TABLES | {"engine": {**TABLES["engine"], "async_scheduling": overlaps}, "backend": {"name": "torch"}}
    resolved, registry = load_with_plugins(environ={}, overrides=tables)
    config = attrs.evolve(resolved.config, model=attrs.evolve(resolved.config.model, max_model_len=128))
    assert simulated_steps(config, registry) == real_steps(config, registry)


# ----------------------------------------------------------------------------------------------------- speculation


class Noted:
    """What became of the drafts of a real run, by request and position of its answer: how many there were, and how many stood."""

    def __init__(self) -> None:
        self.drafts: dict[tuple[int, int], tuple[int, int]] = {}
        self._whose: dict[int, tuple[int, int]] = {}

    def watch(self, executor) -> None:
        submit = executor.submit

        def note(batch):
            self._whose.update((start.row, (start.params.seed, start.num_prompt_tokens)) for start in batch.row_starts)
            pending = submit(batch)
            wait = pending.wait

            def waited():
                output = wait()
                self._note(batch, output)
                return output

            pending.wait = waited
            return pending

        executor.submit = note

    def _note(self, batch, output) -> None:
        if batch.drafts is None:
            return
        for one in batch.passes:
            columns = (one.indices, one.rows, one.starts + one.query_lens)
            for place, row, end in zip(*(column.tolist() for column in columns), strict=True):
                number = int(batch.drafts.num_drafts[place])
                index, num_prompt = self._whose[row]
                if number:
                    self.drafts[index, end - number - num_prompt] = number, int(output.num_emitted[place]) - 1

    def num_proposed(self, indices, positions, most):
        pairs = zip(indices.tolist(), positions.tolist(), strict=True)
        return np.array([self.drafts.get(pair, (0, 0))[0] for pair in pairs], np.int32)

    def num_right(self, indices, positions, counts):
        pairs = list(zip(indices.tolist(), positions.tolist(), strict=True))
        assert counts.tolist() == [self.drafts[pair][0] for pair in pairs]
        return np.array([self.drafts[pair][1] for pair in pairs], np.int32)

    def time_s(self, asked, num_tokens):
        return 0.0


def steps_with_drafts(config, registry, repeats: bool = False) -> tuple[Noted, Any, Any]:
    """Return the drafts of a real engine, its steps, and those of a simulated device that is told what became of the drafts."""
    engine = build_engine(config, registry=registry)
    noted = Noted()
    noted.watch(engine._executor)
    real = steps_of(engine, engine._executor, repeats)
    config = attrs.evolve(config, speculation=simulated_speculation(config, noted))
    clock = SimulatedClock()
    lengths = [request.params.max_tokens for _, request in requests(repeats)]
    executor = SimulatedExecutor(clock, STEP_TIMES, lengths, max_model_len=128, vocab_size=VOCAB_SIZE, drafter=noted)
    simulated = build_engine(config, registry=registry, clock=clock, executor=executor)
    return noted, real, steps_of(simulated, executor, repeats)


def some_right(tokens):
    """Up to four drafts, of which some are wrong; none after every fifth token."""
    number = len(tokens) % 5
    right = fake_text(tokens.tolist(), number, vocab_size=VOCAB_SIZE, eos=-1)
    return [token if (len(tokens) + place) % 4 else (token + 1) % VOCAB_SIZE for place, token in enumerate(right)]


def test_a_simulated_device_makes_the_steps_of_an_engine_with_drafts_that_it_is_told_the_fate_of(fake_house):
    config, registry = fake_house(
        max_model_len=128, speculator=lambda: ScriptedSpeculator(some_right, max_draft_tokens=4)
    )
    options = {"fake": NgramConfig(max_draft_tokens=4)}
    config = attrs.evolve(
        config,
        engine=attrs.evolve(config.engine, max_num_seqs=4, max_num_batched_tokens=48),
        cache=attrs.evolve(config.cache, num_blocks=40),
        speculation=attrs.evolve(config.speculation, components=options),
    )
    noted, real, simulated = steps_with_drafts(config, registry)
    assert simulated == real
    accepted = [number for _, number in noted.drafts.values()]
    assert len(accepted) > 50
    assert {0, 1, 2} <= set(accepted)


@pytest.mark.nightly
@pytest.mark.parametrize("length", ["fixed", "table"])
def test_a_simulated_device_makes_the_steps_of_torch_with_n_grams(length):
    tables = TABLES | {"backend": {"name": "torch"}, "speculation": {"name": "ngram"}, "draft_length": {"name": length}}
    resolved, registry = load_with_plugins(environ={}, overrides=tables)
    config = attrs.evolve(resolved.config, model=attrs.evolve(resolved.config.model, max_model_len=128))
    noted, real, simulated = steps_with_drafts(config, registry, repeats=True)
    assert simulated == real
    assert sum(number for _, number in noted.drafts.values())
    assert len(noted.drafts) > 20
