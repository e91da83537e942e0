"""Several batches in flight, one for each stage: no stage is idle for long, and every text is what it is with one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

from support.core.invariants import broken_invariants
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.errors import RanksLostError
from trencadis.interfaces import AllocationPlan, DraftView, PendingStep, SchedulingPolicy
from trencadis.records import Batch, FinishedSequence, FinishReason, Request, SamplingParams, StepOutput
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.staged_executor import StagedExecutor, num_tokens_of


def make_pipeline(
    num_stages: int,
    *,
    seconds: Callable[[Batch], float] = lambda batch: 1.0,
    backend: Callable[[], FakeBackend] = lambda: FakeBackend(max_model_len=120),
    executor: type[StagedExecutor] = StagedExecutor,
    **options: Any,
) -> tuple[Any, StagedExecutor]:
    clock = SimulatedClock()
    stages = executor(clock=clock, num_stages=num_stages, seconds=seconds, make_backend=backend)
    return make_engine(executor=stages, clock=clock, pipeline=num_stages, **options), stages


def request(name: str, prompt: Collection[int], max_tokens: int, **params: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=sampling)


def texts_of(engine: Any, max_steps: int = 3000) -> dict[str, list[int]]:
    ended = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for one in engine.step().finished:
            assert not one.error, one.error
            ended[one.request_id] = one.token_ids.tolist()
    assert not engine.has_work
    return ended


# ------------------------------------------------------------------------------------------------------- stages


@pytest.mark.parametrize("num_stages", [2, 4])
def test_equal_batches_leave_no_stage_idle(num_stages):
    engine, stages = make_pipeline(num_stages, num_blocks=200, max_num_seqs=12)
    for number in range(12):
        engine.add(request(str(number), (number + 1,), 40, ignore_eos=True))
    texts_of(engine)
    assert stages.most_in_flight == num_stages
    for stage in range(num_stages):
        spans = [spans[stage] for spans in stages.spans.values()][1:]  # the first has all prompts
        assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]


@pytest.mark.representatives(1, ci=1)
@pytest.mark.parametrize(
    ("num_stages", "token_s", "num_blocks", "max_num_seqs"),
    [
        (4, 0.001, 10_000, 64),
        (4, 0.0001, 10_000, 64),
        (2, 0.001, 10_000, 64),
        (2, 0.0001, 10_000, 64),
        (2, 0.001, 2_000, 256),  # blocks are what limits
    ],
)
def test_with_enough_requests_stages_are_idle_for_a_tenth_of_their_time_at_most(
    num_stages, token_s, num_blocks, max_num_seqs
):
    engine, stages = make_pipeline(
        num_stages,
        seconds=lambda batch: 0.008 + token_s * num_tokens_of(batch),
        backend=lambda: FakeBackend(eos=-1, max_model_len=512, strict=False),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
    )
    draw = np.random.default_rng(0)
    for number in range(128):
        prompt = draw.integers(1, 97, draw.integers(20, 400)).tolist()
        engine.add(request(str(number), prompt, int(draw.integers(20, 80))))
    while engine.num_waiting:
        engine.step()
    assert stages.bubble() <= 0.1
    engine.close()


def test_no_decode_is_left_out_for_longer_than_a_round():
    engine, stages = make_pipeline(3, num_blocks=300, max_num_seqs=13, policy=_FewAtFirst())
    for number in range(13):
        engine.add(request(str(number), (number + 1,), 40, ignore_eos=True))
    while engine.num_waiting:
        engine.step()
    since = [0] * 13
    submit = stages.submit

    def watching(batch: Batch) -> PendingStep:
        planned = {row for one in batch.passes for row in one.rows.tolist()}
        since[:] = [0 if row in planned else count + 1 for row, count in enumerate(since)]
        assert max(since) <= 2 + 2, "two batches are of others anyway, and two may leave it out"
        return submit(batch)

    stages.submit = watching
    for _ in range(60):
        engine.step()


class _FewAtFirst(SchedulingPolicy):
    """Admits in batches of very different size."""

    def chunk(self, view, *, slot, num_remaining, token_budget):
        return num_remaining if slot % 6 else 0 if len(view.running) % 5 == 1 else num_remaining


def test_one_step_at_a_time_leaves_all_stages_but_one_idle():
    engine, stages = make_pipeline(4, num_blocks=200, max_num_seqs=12, async_scheduling=False)
    for number in range(12):
        engine.add(request(str(number), (number + 1,), 40, ignore_eos=True))
    texts_of(engine)
    assert (stages.most_in_flight, stages.bubble()) == (1, 0.75)


def test_a_prompt_is_computed_by_all_stages_at_once():
    engine, stages = make_pipeline(4, seconds=num_tokens_of, num_blocks=200, backend=_long)
    prompt = list(range(1, 81)) * 5
    engine.add(request("a", prompt, 1))
    assert texts_of(engine) == {"a": fake_text(prompt, 1)}
    assert [spans[0] for spans in stages.spans.values()] == [(0, 100), (100, 200), (200, 300), (300, 400)]
    assert [spans[3] for spans in stages.spans.values()][-1] == (600, 700)  # one after the other: 1600


def _long() -> FakeBackend:
    return FakeBackend(max_model_len=600)


def test_a_policy_that_takes_prompts_whole_gets_them_whole():
    class Whole(SchedulingPolicy):
        def chunk(self, view, *, slot, num_remaining, token_budget):
            return num_remaining if num_remaining <= token_budget else 0

    engine, stages = make_pipeline(
        4, seconds=num_tokens_of, num_blocks=400, backend=_long, policy=Whole(), max_num_batched_tokens=512
    )
    for number in range(3):
        engine.add(request(str(number), [number + 1] * 400, 1))
    texts_of(engine)
    assert [begin for (begin, _), *_ in stages.spans.values()] == [0, 400, 800]


# -------------------------------------------------------------------------------------------------------- texts


def test_drafts_are_asked_for_those_alone_whose_tokens_are_known():
    asked: list[bool] = []

    class Drafter(ScriptedSpeculator):
        def propose(self, view: DraftView) -> Any:
            table = engine._state.table
            asked.extend(table.num_tokens[view.slots] == table.num_known_tokens[view.slots])
            return super().propose(view)

    engine, _ = make_pipeline(3, num_blocks=100, speculator=Drafter(lambda tokens: [3]))
    prompts = {str(number): [number + 1, 2, 3] for number in range(6)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 12))
    texts = texts_of(engine)
    assert texts == {name: fake_text(prompt, 12) for name, prompt in prompts.items()}
    assert asked
    assert all(asked)


def test_accepted_drafts_that_come_after_a_preemption_end_where_the_text_ends():
    """The text ends with its second draft, and the sequence is preempted while they are in flight."""
    prompts = ([number // 96 + 1, number % 96 + 1] for number in range(9000))
    prompt = next(prompt for prompt in prompts if len(fake_text(prompt, 9)) == 3)
    speculator = ScriptedSpeculator(lambda tokens: fake_text(prompt, 9, eos=-1)[len(tokens) - 2 :][:4])
    engine, _ = make_pipeline(2, num_blocks=60, speculator=speculator)
    engine.add(request("a", prompt, 9))
    engine.step()
    engine._submit_next()  # the draft step
    slot = engine._state.slot_of["a"]
    engine._state.preempt(engine._state.table.sequence(slot))
    assert texts_of(engine) == {"a": fake_text(prompt, 9)}


# ------------------------------------------------------------------------------------------------------- losses


class Lossy(StagedExecutor):
    """Loses its stages with every batch in which a row starts with the token 9."""

    num_losses = 0
    is_lost = False

    def allocate(self, plan: AllocationPlan) -> None:
        self.plan = plan
        super().allocate(plan)

    def submit(self, batch: Batch) -> PendingStep:
        self.is_lost |= any(start.token_ids[0] == 9 for start in batch.row_starts)
        return _Lost() if self.is_lost else _MayBeLost(self, super().submit(batch))

    def restart(self) -> None:
        self.is_lost = False
        self.num_losses += 1
        for stage in (*self.stages, self.backend):
            stage.allocate(self.plan)


class _Lost:
    def wait(self) -> StepOutput:
        raise RanksLostError("The ranks were lost: stage 0 is gone.")


class _MayBeLost(_Lost):
    def __init__(self, executor: Lossy, pending: PendingStep) -> None:
        self._executor, self._pending = executor, pending

    def wait(self) -> StepOutput:
        return super().wait() if self._executor.is_lost else self._pending.wait()


def end_of_poison_beside_others(engine: Engine) -> FinishedSequence:
    """Run six requests, and one that begins with the token 9 as soon as four batches are in flight; returns how that one ended."""
    prompts = {str(number): [number + 1, 2, 3] for number in range(6)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 20))
    for _ in range(4):
        engine.step()
    engine.add(request("poison", [9], 20))
    ended = {}
    while engine.has_work:
        ended.update({one.request_id: one for one in engine.step().finished})
        assert broken_invariants(engine) == []
    poison = ended.pop("poison")
    found = {name: one.token_ids.tolist() for name, one in ended.items()}
    assert found == {name: fake_text(prompt, 20, eos=-1) for name, prompt in prompts.items()}
    return poison


def test_of_all_that_are_in_flight_when_ranks_are_lost_the_one_at_fault_ends_and_no_other_does():
    engine, stages = make_pipeline(
        4, num_blocks=100, executor=Lossy, max_num_seqs=8, backend=lambda: FakeBackend(eos=-1, max_model_len=120)
    )
    assert end_of_poison_beside_others(engine).finish_reason is FinishReason.ERROR
    assert stages.num_losses == 3


class Poisoned(FakeBackend):
    """Fails every step with a sequence that begins with the token 9."""

    def __init__(self) -> None:
        super().__init__(eos=-1, max_model_len=120, fails=self.fail)
        self.firsts: dict[int, int] = {}

    def fail(self, batch: Batch, one: Any) -> None:
        self.firsts.update((start.row, int(start.token_ids[0])) for start in batch.row_starts)
        if any(self.firsts[row] == 9 for row in one.rows.tolist()):
            raise RuntimeError("injected")


def test_a_step_that_fails_with_others_in_flight_ends_the_sequence_at_fault_and_no_other():
    engine, stages = make_pipeline(4, num_blocks=100, max_num_seqs=8, backend=Poisoned)
    assert "injected" in end_of_poison_beside_others(engine).error
    assert stages.most_in_flight == 4
