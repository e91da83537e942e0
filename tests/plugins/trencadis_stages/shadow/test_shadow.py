from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from support.strategies.hostile_policies import HOSTILE, Backwards, Spoils
from trencadis.clock import SimulatedClock
from trencadis.interfaces import Observer, SchedulingPolicy, TokenSplit
from trencadis.records import Request, SamplingParams, StepStats
from trencadis_stages.shadow.shadow import Shadow
from trencadis_testing.engines import ServeInOrder, drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPTS = {str(n): tuple((n * 13 + i) % 97 for i in range(9)) for n in range(6)}


class Seen(Observer):
    def __init__(self) -> None:
        self.stats: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.stats.append(stats)


class SlowClock(SimulatedClock):
    """Each look takes a millisecond."""

    def now_s(self) -> float:
        self.advance(0.001)
        return super().now_s()


def run(shadow: SchedulingPolicy | None, **options: Any) -> tuple[Any, list[StepStats], dict[str, list[int]]]:
    seen = Seen()
    engine = make_engine(
        backend=FakeBackend(eos=-1, max_model_len=64),
        observers=[("seen", seen)],
        max_num_seqs=2,
        num_blocks=7,
        **options,
    )
    if shadow is not None:
        engine._policy.put_beside(Shadow("the shadow", shadow, clock=engine._clock))
    for name, prompt in PROMPTS.items():
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=8)))
    ends = drain(engine)
    return engine, seen.stats, {name: end.token_ids.tolist() for name, end in ends.items()}


def plans(stats: list[StepStats]) -> list[tuple[int, int, int, int]]:
    return [(one.num_sequences, one.num_scheduled_tokens, one.num_running, one.num_preempted) for one in stats]


@pytest.mark.parametrize("shadow", [ServeInOrder, Backwards, Spoils])
def test_a_shadow_changes_no_plan_and_no_token(shadow: type[SchedulingPolicy]):
    _, alone, tokens = run(None)
    engine, watched, same = run(shadow())
    assert plans(watched) == plans(alone)
    assert same == tokens == {name: fake_text(prompt, 8, eos=-1) for name, prompt in PROMPTS.items()}
    assert engine._policy.num_quarantined == 0


def test_an_equal_policy_never_differs_and_another_is_counted():
    engine, stats, _ = run(ServeInOrder())
    report = engine._policy.beside.report()
    assert (report["num_differing_steps"], report["mean_rank_displacement"], report["differing"]) == (0, 0.0, {})
    assert report["num_steps"] == sum(one.num_shadow_steps for one in stats) > 0
    engine, stats, _ = run(Backwards())
    report = engine._policy.beside.report()
    assert report["differing"].keys() == {"order", "victim"}
    assert report["num_differing_steps"] == sum(one.num_shadow_differing for one in stats) > 0


def test_displacement_is_the_mean_of_the_places_by_which_two_orders_differ():
    view = type("View", (), {"waiting": np.array([7, 3, 9, 5], np.int32)})()
    shadow = Shadow("the shadow", Backwards(), clock=SimulatedClock())
    shadow.order(view.waiting, view)
    assert shadow.take_step()["shadow_displacement"] == (3 + 1 + 1 + 3) / 4
    shadow.order(view.waiting[::-1], view)
    assert shadow.take_step()["shadow_displacement"] == 0
    assert shadow.mean_displacement == 1.0
    assert (shadow.num_orders, shadow.num_steps, shadow.num_differing) == (2, 2, 1)


def test_budgets_beyond_the_steps_are_no_difference():
    shadow = Shadow("the shadow", ServeInOrder(), clock=SimulatedClock())
    shadow.split(TokenSplit(decode=64, prefill=1 << 20), object(), token_budget=64)
    assert not shadow.take_step()["num_shadow_differing"]
    shadow.split(TokenSplit(decode=64, prefill=63), object(), token_budget=64)
    assert shadow.take_step()["num_shadow_differing"]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("name", [name for name in HOSTILE if "Fractions" not in name and "Starves" not in name])
def test_a_shadow_that_raises_is_asked_no_more_and_nothing_else_happens(name: str):
    from support.strategies import hostile_policies

    engine, _, tokens = run(getattr(hostile_policies, name.partition(":")[2])())
    assert tokens == {name: fake_text(prompt, 8, eos=-1) for name, prompt in PROMPTS.items()}
    assert engine._policy.beside.report()["fault"].startswith("it raised ")
    assert engine._policy.num_quarantined == 0


def test_its_time_is_its_own_number():
    shadow = Shadow("the shadow", ServeInOrder(), clock=SlowClock())
    shadow.split(TokenSplit(1, 1), object(), token_budget=4)
    assert shadow.take_step()["shadow_s"] == pytest.approx(0.001, abs=0.0005)


def test_what_differs_is_logged_for_those_who_look(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "trencadis.engine")
    run(Backwards())
    assert any("order would be" in record.getMessage() for record in caplog.records)
