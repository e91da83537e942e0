"""Sequences that a stage holds back: asked about in turn, so that a step costs the same however many there are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from trencadis.engine.engine import Engine
from trencadis.engine.scheduling.admission import HeldBack
from trencadis.engine.sequences import Claim, SequenceTable, When
from trencadis.engine.stage import Stage
from trencadis.interfaces import StageDefinition
from trencadis.records import Request, SamplingParams
from trencadis_testing import FakeBackend
from trencadis_testing.engines import make_engine

NUM_HELD, NUM_ASKED = 1000, 256


class NotYet(Claim):
    when = When.PENDING
    reason = "not yet"


class HoldsBack(Stage):
    """Holds back tenant ``held`` until it is opened, and notes who was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_open = False

    def claim(self, sequence: Any, *, num_found: int) -> Claim | None:
        self.asked.append(sequence.request.request_id)
        return NotYet() if sequence.request.tenant == "held" and not self.is_open else None

    def take(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


def add(engine: Engine, name: str, tenant: str, max_tokens: int = 100) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    number = len(engine._state.slot_of)
    prompt = (number % 90 + 1, number // 90 + 1)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, tenant=tenant))


@pytest.fixture
def engine() -> Engine:
    definition = StageDefinition(name="holds_back", make=lambda _: HoldsBack(), summary="Holds back.")
    backend = FakeBackend(eos=-1, max_model_len=128)
    engine = make_engine(backend=backend, stages=[definition], warmup=False, max_num_seqs=8, explain_steps=8)
    add(engine, "runs", "free")
    for number in range(NUM_HELD):
        add(engine, str(number), "held")
    engine.step()
    return engine


def test_each_plan_asks_about_few_and_about_all_in_turn(engine: Engine) -> None:
    stage = engine.stage("holds_back")
    stage.take()
    plans = []
    for _ in range(8):
        engine.step()
        plans.append(stage.take())
    assert {len(asked) for asked in plans} == {NUM_ASKED}
    assert len(set().union(*plans[:4])) == NUM_HELD, "none is left out"
    times = Counter(name for asked in plans for name in asked)
    assert set(times.values()) <= {2, 3}, "those asked about longest ago come first"


def test_new_sequence_is_asked_about_at_once_and_runs(engine: Engine) -> None:
    stage = engine.stage("holds_back")
    stage.take()
    add(engine, "new", "free")
    engine.step()
    engine.step()
    assert stage.take().count("new") == 1
    assert "new" in {engine.inspect().by_slot[slot].request.request_id for slot in engine.inspect().running}


def test_new_sequence_in_the_slot_of_one_that_was_held_back_is_not(engine: Engine) -> None:
    engine.abort(str(NUM_HELD - 1))
    engine.abort("500")
    add(engine, "new", "free")
    engine.step()
    assert "new" in engine.stage("holds_back").take()


def test_one_that_is_let_go_runs_within_a_turn(engine: Engine) -> None:
    engine.stage("holds_back").is_open = True
    for _ in range(2):
        engine.step()
    assert engine.num_running == 8


def test_all_are_asked_about_when_nothing_runs(engine: Engine) -> None:
    stage = engine.stage("holds_back")
    engine.abort("runs")
    stage.take()
    engine.step()
    assert set(stage.take()) == {str(number) for number in range(NUM_HELD)}
    assert engine.is_stalled


def test_the_wait_is_explained(engine: Engine) -> None:
    engine.step()
    reasons = Counter(
        str(engine.answer("explain", {"request_id": str(number)})) for number in (0, 300, 600, NUM_HELD - 1)
    )
    assert any("held it back in an earlier plan" in reason for reason in reasons)


def test_those_that_ran_or_left_are_forgotten() -> None:
    table = SequenceTable(capacity=4)
    held = HeldBack(table, num_asked=1)
    for slot in [table.take_slot() for _ in range(4)]:
        held.add(slot)
    table.new_epoch(0)
    order = np.arange(4, dtype=np.int32)
    asked, left_out = held.left_out(order)
    assert (asked.tolist(), left_out.tolist()) == ([0, 1], [2, 3])
    assert list(held._asked) == [1, 2, 3]
    held.add(1)
    assert held.left_out(order)[0].tolist() == [0, 2]
