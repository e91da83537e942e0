"""Who is drafted for and how much, and what is told of what became of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.strategies.guesses import PROMPT, request, right, wrong
from trencadis.clock import SimulatedClock
from trencadis.interfaces import DraftLength, LengthView, Observer, PendingStep, VerifiedStep
from trencadis.records import Batch, StepStats
from trencadis_testing.doubles import AsManyAsMay, ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text


class Recorder(FakeExecutor):
    """Keeps what every batch computes: ``(row, tokens, drafts)`` of each sequence."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend)
        self.steps: list[list[tuple[int, int, int]]] = []

    def submit(self, batch: Batch) -> PendingStep:
        drafts = None if batch.drafts is None else batch.drafts.num_drafts
        self.steps.append(
            [
                (int(row), int(count), 0 if drafts is None else int(drafts[index]))
                for one in batch.passes
                for index, row, count in zip(one.indices, one.rows, one.query_lens, strict=True)
            ]
        )
        return super().submit(batch)


def recorded(draft: Any = None, **options: Any) -> tuple[Any, Recorder]:
    executor = Recorder(FakeBackend(eos=-1))
    speculator = None if draft is None else ScriptedSpeculator(draft)
    return make_engine(executor=executor, speculator=speculator, async_scheduling=False, **options), executor


class Told(AsManyAsMay):
    """Remembers views, verdicts and ends."""

    def __init__(self) -> None:
        self.views: list[LengthView] = []
        self.steps: list[VerifiedStep] = []
        self.ended: list[int] = []

    def choose(self, view: LengthView) -> Any:
        self.views.append(view)
        return super().choose(view)

    def on_verified(self, step: VerifiedStep) -> None:
        self.steps.append(step)

    def on_finished(self, *, slot: int) -> None:
        self.ended.append(slot)


class Seen(Observer):
    """Keeps the statistics of steps."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)


# --------------------------------------------------------------------------------------------------- who and how much


@pytest.mark.parametrize(("limit", "most"), [(None, 3), (0, 0), (1, 1), (2, 2), (50, 3)])
def test_a_request_says_how_many_drafts_it_takes(limit: int | None, most: int) -> None:
    engine, executor = recorded(right)
    engine.add(request("r", max_draft_tokens=limit))
    assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, 12, eos=-1)
    assert max(drafts for step in executor.steps for _, _, drafts in step) == most


def test_requests_side_by_side_keep_their_own_limits() -> None:
    engine, executor = recorded(right)
    slots = {limit: engine.add(request(str(limit), max_draft_tokens=limit)) for limit in (0, 1, 3)}
    engine.step()
    rows = {int(engine._state.table.row[slot]): limit for limit, slot in slots.items()}
    engine.step()
    assert {rows[row]: drafts for row, _, drafts in executor.steps[-1]} == {0: 0, 1: 1, 3: 3}


def test_no_draft_goes_beyond_the_longest_output() -> None:
    """Four tokens are left after the first: three drafts and the one behind them; then nothing is left to draft for."""
    engine, executor = recorded(right)
    engine.add(request("r", max_tokens=5))
    assert len(drain(engine)["r"].token_ids) == 5
    assert [step[0][2] for step in executor.steps] == [0, 3]
    engine, executor = recorded(right)
    engine.add(request("r", max_tokens=3))
    drain(engine)
    assert [step[0][2] for step in executor.steps] == [0, 1]


def test_the_draft_length_sees_who_decodes_and_who_waits() -> None:
    told = Told()
    engine = make_engine(
        backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(wrong), draft_length=told, max_num_seqs=2
    )
    engine.add(request("a"))
    engine.add(request("b", max_draft_tokens=0))
    engine.add(request("c"))
    engine.step()
    engine.step()
    view = told.views[0]
    assert view.slots.tolist() == [engine.inspect().sequences["a"].slot]
    assert view.max_draft_tokens.tolist() == [3]
    assert (view.num_running, view.num_waiting, view.pads) == (2, 1, False)
    assert view.padded_tokens(3, 4) == 12


def test_a_padded_layout_says_so_and_what_its_buckets_cost() -> None:
    told = Told()
    engine = make_engine(
        backend=FakeBackend(eos=-1, layout="padded"),
        speculator=ScriptedSpeculator(wrong),
        draft_length=told,
        warmup=False,
    )
    engine.add(request("a"))
    drain(engine)
    assert told.views[0].pads
    assert told.views[0].padded_tokens(3, 4) == 12  # exact shapes


def test_nothing_is_asked_where_nobody_decodes() -> None:
    told = Told()
    engine = make_engine(speculator=ScriptedSpeculator(right), draft_length=told, max_num_batched_tokens=4)
    engine.add(request("a"))
    engine.step()
    assert told.views == []


def test_zero_drafts_are_not_asked_of_the_speculator() -> None:
    class Off(DraftLength):
        def choose(self, view: LengthView) -> Any:
            return np.zeros(len(view.slots), np.int32)

    def never(tokens: Any) -> list[int]:
        raise AssertionError("asked for drafts")

    engine = make_engine(backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(never), draft_length=Off())
    engine.add(request("r"))
    assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, 12, eos=-1)
    assert engine.stage("speculation").fault == ""


# --------------------------------------------------------------------------------------------------------- verdicts


def test_verdicts_name_what_was_drafted_and_what_stood() -> None:
    told = Told()
    executor = Recorder(FakeBackend(eos=-1))
    speculator = ScriptedSpeculator(lambda tokens: [*right(tokens)[:2], 96 - right(tokens)[2]])
    engine = make_engine(executor=executor, speculator=speculator, draft_length=told)
    slot = engine.add(request("r", max_tokens=8))
    drain(engine)
    assert [(step.num_drafts.tolist(), step.num_accepted.tolist()) for step in told.steps] == [
        ([3], [2]),
        ([3], [2]),
        ([0], [0]),
    ]
    assert [step.slots.tolist() for step in told.steps] == [[slot]] * 3
    assert [step.num_tokens for step in told.steps] == [4, 4, 1]
    assert told.ended == [slot]


def test_verdicts_say_what_was_prefilled_beside() -> None:
    told = Told()
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(wrong), draft_length=told)
    engine.add(request("a"))
    engine.step()
    engine.add(request("b", (5, 6, 7)))
    engine.step()
    step = told.steps[-1]
    assert (step.num_prefill_tokens, step.num_tokens, step.num_drafts.tolist()) == (3, 1 + 3 + 3, [3])


def test_verdicts_say_how_long_drafts_and_all_else_since_the_step_before_took() -> None:
    clock = SimulatedClock()

    def slowly(tokens: Any) -> list[int]:
        clock.advance(0.25)
        return right(tokens)

    class Slow(FakeExecutor):
        def submit(self, batch: Batch) -> PendingStep:
            clock.advance(2.0)
            return super().submit(batch)

    told, seen = Told(), Seen()
    engine = make_engine(
        executor=Slow(FakeBackend(eos=-1)),
        speculator=ScriptedSpeculator(slowly),
        draft_length=told,
        clock=clock,
        observers=[("seen", seen)],
    )
    engine.add(request("r", max_tokens=5))
    while engine.has_work:
        engine.step()
        clock.advance(1.0)
    assert [(step.draft_s, step.step_s) for step in told.steps] == [(0.25, 3.0)]
    assert [step.draft_s for step in seen.steps] == [0.0, 0.25]
    assert engine.totals.draft_s == 0.25


@pytest.mark.parametrize("layout", ["ragged", "padded", "unified"])
def test_oracle_drafts_take_a_step_for_four_tokens_and_wrong_ones_a_step_each(layout: str) -> None:
    for draft, num_decodes in ((right, 3), (wrong, 12)):
        engine = make_engine(
            backend=FakeBackend(eos=-1, layout=layout), speculator=ScriptedSpeculator(draft), warmup=False
        )
        engine.add(request("r", max_tokens=13))
        assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, 13, eos=-1)
        assert engine.totals.num_steps == 1 + num_decodes


# --------------------------------------------------------------------------------------------------- start and end


def test_a_speculator_that_cannot_be_given_the_sizes_ends_the_start() -> None:
    class Huge(ScriptedSpeculator):
        def allocate(self, limits: Any) -> None:
            raise MemoryError("no room for the draft model")

    with pytest.raises(MemoryError, match="draft model"):
        make_engine(speculator=Huge(right))


# ------------------------------------------------------------------------------------------------------------- rests


class Resting(Told):
    """Chooses drafts where it is not said otherwise, and rests after a choice of none."""

    def __init__(self, steps: Any) -> None:
        super().__init__()
        self.rests = steps

    def choose(self, view: LengthView) -> Any:
        chosen = super().choose(view)
        return chosen * (len(self.views) > 2)

    def rest(self) -> Any:
        return self.rests


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_draft_length_that_rests_is_neither_asked_nor_told(steps: int) -> None:
    told = Resting(steps)
    engine, executor = recorded(right, draft_length=told)
    engine.add(request("r", max_tokens=20))
    assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, 20, eos=-1)
    # A prefill, then twice a step of no drafts with so many after it.
    drafts = [step[0][2] for step in executor.steps]
    assert drafts[: 4 + 2 * steps] == [0] * (3 + 2 * steps) + [3]
    assert len(told.steps) - len(told.views) in (0, 1)  # nothing is asked for the last token
    assert [int(step.num_drafts[0]) for step in told.steps][:3] == [0, 0, 3]


class Standing(Told):
    """Chooses once for as long as the same sequences decode."""

    def rest(self) -> int:
        return 1 << 30


def test_lengths_stand_for_the_same_sequences_and_not_for_the_next_one_in_a_slot() -> None:
    told = Standing()
    engine, executor = recorded(right, draft_length=told)
    slots, most = [], []
    for name, limit in (("a", 1), ("b", None)):
        executor.steps.clear()
        slots.append(engine.add(request(name, max_tokens=20, max_draft_tokens=limit)))
        assert drain(engine)[name].token_ids.tolist() == fake_text(PROMPT, 20, eos=-1)
        most.append(max(drafts for step in executor.steps for _, _, drafts in step))
    assert slots[0] == slots[1], "the second one takes the first one's slot"
    assert most == [1, 3]
    assert (len(told.views), len(told.steps)) == (2, 2)


@pytest.mark.parametrize("steps", [-1, 2.0, None])
def test_a_rest_that_is_no_number_of_steps_ends_speculation(steps: Any) -> None:
    engine, executor = recorded(right, draft_length=Resting(steps))
    engine.add(request("r"))
    assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, 12, eos=-1)
    assert "rest() returned" in engine.inspect().stages["speculation"]
    assert not any(step[0][2] for step in executor.steps)
