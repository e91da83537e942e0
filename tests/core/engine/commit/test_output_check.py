"""What a step brings back is checked before it counts: whatever an executor returns, texts are right or requests end with its name."""

from __future__ import annotations

import logging

import pytest

from support.core.hostile_outputs import SPOILS, SpoilingExecutor
from support.core.invariants import broken_invariants
from support.strategies.guesses import right
from trencadis.engine.engine import Engine
from trencadis.interfaces import PendingStep
from trencadis.records import Batch, FinishedSequence, FinishReason, Request, RowError, SamplingParams, StepOutput
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPTS = {"a": (1, 2, 3), "b": (4, 5, 6, 7, 8), "c": (9,)}
NUM_TOKENS = 12


def engine_of(executor: FakeExecutor, *, overlap: bool) -> Engine:
    executor._given = FakeBackend(eos=-1, max_model_len=256)
    engine = make_engine(executor=executor, async_scheduling=overlap, connector=LoopConnector().pair())
    for name, prompt in PROMPTS.items():
        add(engine, name, prompt)
    return engine


def add(engine: Engine, name: str, prompt: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params))


def is_text_of(ended: FinishedSequence, prompt: tuple[int, ...]) -> bool:
    return not ended.error and ended.token_ids.tolist() == fake_text(prompt, NUM_TOKENS, eos=-1)


@pytest.mark.representatives(16)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SPOILS)
def test_a_spoilt_step_costs_a_step_and_no_text(name: str, overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    executor = SpoilingExecutor(SPOILS[name], lambda batch: batch.step == 4)
    engine = engine_of(executor, overlap=overlap)
    with caplog.at_level(logging.ERROR):
        ended = drain(engine)
    assert executor.num_spoilt == 1
    assert engine.totals.num_failed_steps == 1
    assert all(is_text_of(ended[name], prompt) for name, prompt in PROMPTS.items())
    assert "the executor" in caplog.text
    assert not broken_invariants(engine)


@pytest.mark.representatives(16)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SPOILS)
def test_an_executor_that_always_errs_ends_requests_with_its_name_and_not_the_engine(name: str, overlap: bool) -> None:
    executor = SpoilingExecutor(SPOILS[name], lambda batch: batch.num_sequences > 0)
    engine = engine_of(executor, overlap=overlap)
    ended = drain(engine)
    assert {one.finish_reason for one in ended.values()} == {FinishReason.ERROR}
    assert all(one.error.startswith("the executor") for one in ended.values())
    executor.is_due = lambda batch: False
    add(engine, "later", PROMPTS["a"])
    assert is_text_of(drain(engine)["later"], PROMPTS["a"])


def test_the_output_of_an_earlier_step_is_none_of_a_later_one() -> None:
    """Its numbers would fit: the same sequences, one token each."""

    class Stale(FakeExecutor):
        held: StepOutput | None = None

        def submit(self, batch: Batch) -> PendingStep:
            pending = super().submit(batch)
            if batch.step == 3:
                self.held = pending.wait()
            if batch.step != 4:
                return pending
            pending.wait()
            return Canned(self.held)

    executor = Stale()
    engine = engine_of(executor, overlap=False)
    ended = drain(engine)
    assert executor.held is not None
    assert engine.totals.num_failed_steps == 1
    assert all(is_text_of(ended[name], prompt) for name, prompt in PROMPTS.items())


class Canned:
    """A step with a given output."""

    def __init__(self, output: StepOutput | None) -> None:
        self.output = output

    def wait(self) -> StepOutput:
        assert self.output is not None
        return self.output


@pytest.mark.parametrize("what", ["raises", "none"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step", [0, 5])
def test_a_step_that_cannot_be_submitted_fails_alone(step: int, overlap: bool, what: str) -> None:
    class Refusing(FakeExecutor):
        num_refused = 0

        def submit(self, batch: Batch) -> PendingStep:
            if batch.step == step:
                self.num_refused += 1
                if what == "raises":
                    raise OSError("the device is away")
                return None  # type: ignore[return-value]
            return super().submit(batch)

    executor = Refusing()
    engine = engine_of(executor, overlap=overlap)
    ended = drain(engine)
    assert executor.num_refused == engine.totals.num_failed_steps == 1
    assert all(is_text_of(ended[name], prompt) for name, prompt in PROMPTS.items())
    assert not broken_invariants(engine)


@pytest.mark.parametrize(("is_invalid", "reason"), [(False, FinishReason.ERROR), (True, FinishReason.INVALID)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_the_error_of_one_row_ends_that_sequence_and_the_others_keep_their_tokens(
    step: int, overlap: bool, is_invalid: bool, reason: FinishReason
) -> None:
    """Nothing is computed twice: as many steps run as without the error."""

    class OneRow(FakeExecutor):
        def submit(self, batch: Batch) -> PendingStep:
            pending = super().submit(batch)
            return WithoutRow(pending, "index 1 has no token", is_invalid) if batch.step == step else pending

    engine = engine_of(OneRow(), overlap=overlap)
    ended = drain(engine)
    assert ended["b"].finish_reason is reason
    assert ended["b"].error == "index 1 has no token"
    assert len(ended["b"].token_ids) == step
    assert ended["b"].token_ids.tolist() == fake_text(PROMPTS["b"], NUM_TOKENS, eos=-1)[:step]
    assert all(is_text_of(ended[name], PROMPTS[name]) for name in ("a", "c"))
    assert engine.totals.num_failed_steps == engine.totals.num_recomputed_tokens == 0
    assert engine.inspect().blocks.num_used == 0
    assert not broken_invariants(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_what_a_backend_writes_to_its_batch_changes_no_text(overlap: bool, drafts: bool) -> None:
    class Scribbling(FakeExecutor):
        def submit(self, batch: Batch) -> PendingStep:
            done = Canned(super().submit(batch).wait())
            arrays = [
                getattr(one, name) for one in batch.passes for name in ("rows", "starts", "query_lens", "num_logits")
            ]
            for array in [*arrays, *([batch.drafts.num_drafts, batch.drafts.token_ids] if batch.drafts else [])]:
                array[:] = 3
            return done

    executor = Scribbling(FakeBackend(eos=-1, max_model_len=256))
    speculator = ScriptedSpeculator(right) if drafts else None
    engine = make_engine(executor=executor, async_scheduling=overlap, speculator=speculator)
    for name, prompt in PROMPTS.items():
        add(engine, name, prompt)
    ended = drain(engine)
    assert all(is_text_of(ended[name], prompt) for name, prompt in PROMPTS.items())
    assert not broken_invariants(engine)


class WithoutRow:
    """A step that has an error for sequence 1 instead of its token."""

    def __init__(self, pending: PendingStep, message: str, is_invalid: bool) -> None:
        self.pending = pending
        self.message = message
        self.is_invalid = is_invalid

    def wait(self) -> StepOutput:
        output = self.pending.wait()
        counts, tokens = output.num_emitted.copy(), output.token_ids
        assert counts.tolist() == [1, 1, 1]
        counts[1] = 0
        return StepOutput(
            token_ids=tokens[[0, 2]],
            num_emitted=counts,
            step=output.step,
            row_errors=(RowError(index=1, message=self.message, is_invalid=self.is_invalid),),
        )
