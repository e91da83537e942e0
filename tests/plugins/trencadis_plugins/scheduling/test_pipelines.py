"""Policies know nothing of pipelines, and serve in them: every text is right, and none is quarantined."""

from __future__ import annotations

import random

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.records import Request, SamplingParams
from trencadis_plugins.scheduling import trencadis_scheduling_policies
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.staged_executor import StagedExecutor, num_tokens_of

COMPONENTS = {component.name: component for component in trencadis_scheduling_policies()}


@pytest.mark.representatives(2, ci=3)
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", COMPONENTS)
def test_texts_are_right_and_the_policy_stays(name, num_stages):
    clock, component = SimulatedClock(), COMPONENTS[name]
    context = ComponentContext(clock=clock, seed=0, make=lambda noun, name: Fcfs())
    stages = StagedExecutor(
        clock=clock,
        num_stages=num_stages,
        seconds=lambda batch: 0.008 + 0.0001 * num_tokens_of(batch),
        make_backend=lambda: FakeBackend(max_model_len=200),
    )
    engine = make_engine(
        executor=stages,
        clock=clock,
        pipeline=num_stages,
        policy=component.factory(component.config(), context),
        num_blocks=120,
        max_num_seqs=12,
        max_num_batched_tokens=48,
    )
    draw, expected, found = random.Random(1), {}, {}
    for number in range(30):
        prompt = [(position * draw.choice([3, 4, 5])) % 90 + 1 for position in range(draw.randint(1, 60))]
        params = SamplingParams(max_tokens=draw.randint(1, 25))
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            params=params,
            priority=draw.randrange(3),
            tenant=draw.choice("ab"),
        )
        expected[str(number)] = fake_text(prompt, params.max_tokens), ""
        engine.add(request)
        found.update({one.request_id: (one.token_ids.tolist(), one.error) for one in engine.step().finished})
    while engine.has_work:
        found.update({one.request_id: (one.token_ids.tolist(), one.error) for one in engine.step().finished})
    assert found == expected
    assert engine._policy.num_quarantined == 0
    assert stages.most_in_flight == num_stages
