"""Who is drafted for and how much; and that nothing but time depends on it, even when a component fails."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.engine.drafting import Drafting
from trencadis.interfaces import DraftLength, DraftView, LengthView, Observer, PendingStep, Speculator, VerifiedStep
from trencadis.records import Batch, Drafts, FinishReason, Request, SamplingParams, StepStats
from trencadis_testing.doubles import AsManyAsMay, LoopConnector, ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.invariants import broken_invariants

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 12, **params}))


def right(tokens: Any) -> list[int]:
    return fake_text(tokens.tolist(), 3, eos=-1)


def wrong(tokens: Any) -> list[int]:
    return [(right(tokens)[0] + 1) % 97] * 3


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
    assert view.slots.tolist() == [engine._state.slot_of["a"]]
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
    assert engine._drafting.fault == ""


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


def test_verdicts_say_how_long_drafts_and_the_rest_of_the_step_took() -> None:
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
    drain(engine)
    assert [(step.draft_s, step.step_s) for step in told.steps] == [(0.25, 2.0)]
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


# ------------------------------------------------------------------------------------------------ components that fail


class Broken(ScriptedSpeculator):
    """Drafts rightly until it is broken in one way."""

    def __init__(self, way: str) -> None:
        super().__init__(right)
        self.way = way
        self.num_calls = 0
        self.is_closed = False

    def propose(self, view: DraftView) -> Drafts:
        self.num_calls += 1
        drafts = super().propose(view)
        if self.num_calls < 3:
            return drafts
        match self.way:
            case "raises":
                raise RuntimeError("boom")
            case "too many":
                return Drafts(num_drafts=drafts.num_drafts + 9, token_ids=np.repeat(drafts.token_ids, 9))
            case "negative":
                return Drafts(num_drafts=drafts.num_drafts * 0 - 1, token_ids=drafts.token_ids[:0])
            case "miscounted":
                return attrs.evolve(drafts, token_ids=drafts.token_ids[:-1])
            case "a tree":
                return attrs.evolve(drafts, parents=np.full(len(drafts.token_ids), -1, np.int32))
            case "nothing":
                return None  # type: ignore[return-value]
        return drafts

    def on_verified(self, **verdict: Any) -> None:
        if self.way == "cannot be told" and self.num_calls > 1:
            raise RuntimeError("boom")
        super().on_verified(**verdict)

    def on_finished(self, **end: Any) -> None:
        if self.way == "cannot end":
            raise RuntimeError("boom")

    def close(self) -> None:
        self.is_closed = True


WAYS = ["raises", "too many", "negative", "miscounted", "a tree", "nothing", "cannot be told", "cannot end"]


@pytest.mark.parametrize("way", WAYS)
def test_a_speculator_that_fails_is_switched_off_and_requests_go_on(way: str, caplog: pytest.LogCaptureFixture) -> None:
    speculator = Broken(way)
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=speculator)
    for name, length in (("first", 4), ("other", 40)):
        engine.add(request(name, max_tokens=length))
    ends = drain(engine)
    assert {name: end.token_ids.tolist() for name, end in ends.items()} == {
        "first": fake_text(PROMPT, 4, eos=-1),
        "other": fake_text(PROMPT, 40, eos=-1),
    }
    assert {end.finish_reason for end in ends.values()} == {FinishReason.LENGTH}
    assert engine._drafting.fault.startswith("Broken raised")
    assert engine.totals.num_drafters_quarantined == 1
    assert speculator.is_closed
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "Broken raised" in errors[0]
    assert "Speculation goes off" in errors[0]


def test_an_engine_whose_speculator_failed_takes_new_requests() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=Broken("raises"))
    for name in ("one", "two", "three"):
        engine.add(request(name, max_tokens=30))
        assert drain(engine)[name].token_ids.tolist() == fake_text(PROMPT, 30, eos=-1)
        assert broken_invariants(engine) == []
    engine.close()


class BrokenLength(AsManyAsMay):
    def __init__(self, way: str) -> None:
        self.way = way

    def choose(self, view: LengthView) -> Any:
        match self.way:
            case "raises":
                raise RuntimeError("boom")
            case "too many":
                return view.max_draft_tokens + 1
            case "negative":
                return view.max_draft_tokens * 0 - 1
            case "one for all":
                return np.ones(7, np.int32)
        return view.max_draft_tokens

    def on_verified(self, step: VerifiedStep) -> None:
        if self.way == "cannot be told":
            raise RuntimeError("boom")

    def on_finished(self, *, slot: int) -> None:
        if self.way == "cannot end":
            raise RuntimeError("boom")


@pytest.mark.parametrize("way", ["raises", "too many", "negative", "one for all", "cannot be told", "cannot end"])
def test_a_draft_length_that_fails_is_switched_off_and_requests_go_on(way: str) -> None:
    engine = make_engine(
        backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(right), draft_length=BrokenLength(way)
    )
    engine.add(request("r"))
    engine.add(request("s", max_tokens=20))
    ends = drain(engine)
    assert ends["r"].token_ids.tolist() == fake_text(PROMPT, 12, eos=-1)
    assert ends["s"].token_ids.tolist() == fake_text(PROMPT, 20, eos=-1)
    assert engine._drafting.fault.startswith("BrokenLength raised")


def test_a_speculator_that_cannot_be_given_the_sizes_ends_the_start() -> None:
    class Huge(ScriptedSpeculator):
        def allocate(self, limits: Any) -> None:
            raise MemoryError("no room for the draft model")

    with pytest.raises(MemoryError, match="draft model"):
        make_engine(speculator=Huge(right))


def test_without_speculation_nothing_is_drafted_or_counted() -> None:
    drafting = Drafting(make_engine()._state)
    assert drafting.propose()[0] is None
    assert (drafting.num_quarantined, drafting.fault, drafting.draft_s) == (0, "", 0.0)
    drafting.finished(0, np.zeros(1, np.int32))
    drafting.close()


# ------------------------------------------------------------------------------------------------- verified tokens only


@pytest.mark.parametrize("draft", [right, wrong, lambda tokens: [*right(tokens)[:1], 3, 3]])
def test_only_verified_tokens_are_saved_by_a_connector(draft: Any) -> None:
    """A block is saved when its tokens are committed, so a new engine that loads them has the very same text."""
    connector = LoopConnector()
    engine = make_engine(
        backend=FakeBackend(eos=-1),
        speculator=ScriptedSpeculator(draft),
        connector=connector.pair(),
        prefix_caching=False,
    )
    engine.add(request("a", max_tokens=18))
    text = drain(engine)["a"].token_ids.tolist()
    assert text == fake_text(PROMPT, 18, eos=-1)
    longer = (*PROMPT, *text)
    assert len(connector.store.blocks) == (len(longer) - 1) // 4
    engine.add(request("b", longer))
    end = drain(engine)["b"]
    assert end.token_ids.tolist() == fake_text(longer, 12, eos=-1)
    assert end.num_cached_tokens == (len(longer) - 1) // 4 * 4


@pytest.mark.parametrize("draft", [right, wrong])
def test_a_connector_holds_no_block_that_only_drafts_were_given(draft: Any) -> None:
    connector, held = LoopConnector(holds=True), []
    engine = make_engine(
        backend=FakeBackend(eos=-1),
        speculator=ScriptedSpeculator(draft),
        connector=connector.pair(),
        prefix_caching=False,
    )
    on_finished = connector.scheduler.on_finished
    connector.scheduler.on_finished = lambda request, blocks: (
        held.append(len(blocks))
        or on_finished(  # type: ignore[method-assign]
            request, blocks=blocks
        )
    )
    for length in range(1, 9):
        engine.add(request(str(length), max_tokens=20))
        while engine._state.slot_of and len(engine._state.known_tokens(engine._state.table.sequence(0))) < 10 + length:
            engine.step()
        sequence = engine._state.table.sequences[0]
        known = len(engine._state.known_tokens(sequence))
        engine.stop(str(length))
        assert held[-1] <= -(-known // 4)
        drain(engine)
        assert engine._state.blocks.num_used == 0


@pytest.mark.parametrize("draft", [right, wrong])
def test_only_verified_tokens_are_found_in_the_prefix_cache(draft: Any) -> None:
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(draft))
    engine.add(request("a", max_tokens=18))
    text = drain(engine)["a"].token_ids.tolist()
    longer = (*PROMPT, *text)
    engine.add(request("b", longer))
    end = drain(engine)["b"]
    assert end.num_cached_tokens == (len(longer) - 1) // 4 * 4
    assert end.token_ids.tolist() == fake_text(longer, 12, eos=-1)


def test_speculators_see_committed_tokens_only() -> None:
    seen: list[list[int]] = []

    class Watching(Speculator):
        max_draft_tokens = 3

        def propose(self, view: DraftView) -> Drafts:
            seen.extend(tokens.tolist() for tokens in view.token_ids)
            return ScriptedSpeculator(wrong).propose(view)

    engine = make_engine(backend=FakeBackend(eos=-1), speculator=Watching())
    engine.add(request("r"))
    drain(engine)
    whole = [*PROMPT, *fake_text(PROMPT, 12, eos=-1)]
    assert seen
    assert all(tokens == whole[: len(tokens)] for tokens in seen)
