"""Stages: an engine calls only the moments that a configured stage defines, in the order of the stages."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.engine.scheduling.scheduler import Scheduler
from trencadis.engine.stage import EngineKinds, Stage, Stages
from trencadis.engine.step import SubmittedStep
from trencadis.errors import ContractError, PluginLoadError
from trencadis.interfaces import StageDefinition
from trencadis.records import Batch, FinishedSequence, Plan, Request, SamplingParams
from trencadis_testing.engines import drain, make_engine


class Recorder(Stage):
    """Keeps the order of its calls in a list that it shares with others."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def after_plan(self, step: SubmittedStep | None) -> None:
        if step is not None:
            self._calls.append(f"{self._name} after plan {step.plan.step}")

    def left(self, finished: FinishedSequence) -> None:
        self._calls.append(f"{self._name} {finished.request_id}")


class FailsOnce(Stage):
    """Refuses the first batch."""

    num_batches = 0

    def after_build(self, step: SubmittedStep, batch: Batch) -> None:
        self.num_batches += 1
        if self.num_batches == 1:
            raise ValueError("no room on the device")


class PlansOneByOne(Stage):
    """Puts a scheduler of its own in place, and has one step follow the other."""

    def compose(self, kinds: EngineKinds) -> EngineKinds:
        return attrs.evolve(kinds, depth=1, scheduler=OwnScheduler)


class OwnScheduler(Scheduler):
    num_plans = 0

    def next_plan(self, *args: Any, **options: Any) -> Plan | None:
        self.num_plans += 1
        return super().next_plan(*args, **options)


def request(name: str = "a") -> Request:
    prompt = np.arange(1, 6, dtype=np.int32)
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=3, temperature=0))


@pytest.mark.parametrize("num_steps", [0, 8])
def test_what_is_off_is_not_on_the_path_of_a_step(num_steps: int) -> None:
    stages = make_engine(explain_steps=num_steps)._stages
    for calls in (stages.after_plan, stages.after_build, stages.left):
        assert any(call.__self__.name == "explain" for call in calls) == bool(num_steps)


def test_an_engine_calls_its_stages_in_their_order() -> None:
    calls: list[str] = []
    engine = make_engine()
    engine._stages = engine._endings._stages = Stages([Recorder("first", calls), Recorder("second", calls)])
    assert engine._stages.after_build == ()
    engine.add(request())
    drain(engine)
    assert calls[:2] == ["first after plan 0", "second after plan 0"]
    assert calls[-2:] == ["first a", "second a"]


def test_an_error_before_a_batch_is_submitted_fails_the_step_and_no_text() -> None:
    engine, undisturbed = make_engine(), make_engine()
    engine._stages = engine._endings._stages = Stages([FailsOnce()])
    for each in (engine, undisturbed):
        each.add(request("a"))
        each.add(request("b"))
    ended, expected = drain(engine), drain(undisturbed)
    assert engine.totals.num_failed_steps == 1
    assert {name: one.token_ids.tolist() for name, one in ended.items()} == {
        name: one.token_ids.tolist() for name, one in expected.items()
    }


def test_a_stage_may_put_a_class_of_its_own_in_the_place_of_the_engines() -> None:
    one = StageDefinition(name="one_by_one", make=lambda _: PlansOneByOne(), summary="Plans one by one.")
    engine, usual = make_engine(stages=[one]), make_engine()
    for each in (engine, usual):
        each.add(request())
        each.step()
    assert isinstance(engine._scheduler, OwnScheduler)
    assert engine._scheduler.num_plans == 1
    assert (len(engine._in_flight), len(usual._in_flight)) == (0, 1)
    assert drain(engine)["a"].token_ids.tolist() == drain(usual)["a"].token_ids.tolist()


def test_a_stage_that_leaves_an_engine_without_kinds_is_named() -> None:
    class Forgets(Stage):
        def compose(self, kinds: EngineKinds) -> None:
            attrs.evolve(kinds, depth=1)

    bad = StageDefinition(name="forgets", make=lambda _: Forgets(), summary="Forgets.")
    with pytest.raises(ContractError, match=r'"forgets".*its compose\(\) returned None, where EngineKinds is expected'):
        make_engine(stages=[bad])


@pytest.mark.parametrize("method", ["when", "make", "compose", "allocate"])
def test_a_stage_that_raises_at_the_start_is_named(method: str) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("size")

    kind = type("Fails", (Stage,), {method: fails})
    definition = StageDefinition(name="fails", make=lambda _: kind(), summary="Fails.")
    if method in ("when", "make"):
        definition = attrs.evolve(definition, **{method: fails})
    with pytest.raises(
        PluginLoadError, match=rf'stage "fails" of .* raised KeyError.*size.* in {method}\(\)'
    ) as raised:
        make_engine(stages=[definition])
    assert raised.value.hint == "Correct it, or do not pass it."


def test_a_stage_that_allocates_nothing_is_named() -> None:
    kind = type("Forgets", (Stage,), {"allocate": lambda *_: None})
    bad = StageDefinition(name="forgets", make=lambda _: kind(), summary="Forgets.")
    with pytest.raises(ContractError, match=r'"forgets".*its allocate\(\) returned None, where AllocationPlan is'):
        make_engine(stages=[bad])
