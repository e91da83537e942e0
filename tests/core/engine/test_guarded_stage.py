"""Stages of other distributions: a fault at a moment ends no step, and no request but the one that it is about."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.engine import guarded_stage
from trencadis.engine.engine import Engine
from trencadis.engine.sequences import Claim, SequenceState, When
from trencadis.engine.stage import Stage
from trencadis.engine.step import Obstacle
from trencadis.errors import BackendError, InvalidRequestError, PluginError, RanksLostError, RequestRefusedError
from trencadis.faults import switched_off
from trencadis.interfaces import Observer, StageDefinition
from trencadis.records import FinishReason, Request, SamplingParams, StepStats
from trencadis_testing import FakeBackend
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import fake_text

MOMENTS = (
    "refused",
    "before_step",
    "after_plan",
    "received",
    "after_step",
    "leaving",
    "left",
    "failed",
    "wants_empty_plan",
    "drop",
    "idle",
    "hear",
)
"""Moments at which a fault costs no request anything."""


def failing(*moments: str, times: int = 1, error: Any = ValueError, **own: Any) -> type[Stage]:
    """Return a stage that raises at some moments the first few times, and does what ``own`` says at others."""

    def fails(moment: str) -> Any:
        def fail(self: Any, *args: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls <= times:
                raise error(f"broken {moment}")
            return getattr(Stage, moment)(self, *args, **named)

        return fail

    return type("Failing", (Stage,), {"calls": 0, **{moment: fails(moment) for moment in moments}, **own})


def engine_with(kind: type[Stage], **options: Any) -> Engine:
    options = {"backend": FakeBackend(eos=-1, max_model_len=64), "max_num_seqs": 4, "warmup": False, **options}
    return make_engine(stages=[StageDefinition(name="third", make=lambda _: kind(), summary="Fails.")], **options)


def request(name: str = "a", max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(request_id=name, prompt_token_ids=tuple(range(1, 1 + 5 + len(name))), params=params)


def texts(ended: Iterable[Any]) -> dict[str, list[int]]:
    return {one.request_id: one.token_ids.tolist() for one in ended}


def expected(*names: str) -> dict[str, list[int]]:
    return {name: fake_text(list(request(name).prompt_token_ids), 4, eos=-1) for name in names}


def fault_of(engine: Engine) -> Any:
    return engine._stages.called[[one.name for one in engine._stages.all].index("third")]


def complaint_in(caplog: pytest.LogCaptureFixture, moment: str) -> str:
    found = [one.message for one in caplog.records if f"in {moment}()" in one.message]
    assert found, f"nothing was said of {moment}"
    return found[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_fault_is_reported_and_no_request_suffers(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    failures = iter([BackendError("the device failed")])

    def fails(*_: Any) -> None:
        for error in failures:
            raise error

    engine = engine_with(failing(moment), backend=FakeBackend(eos=-1, max_model_len=64, fails=fails))
    engine.add(request("a"))
    with pytest.raises(InvalidRequestError):
        engine.add(request("a"))
    engine.add(request("bb"))
    if moment == "wants_empty_plan":
        assert not engine._scheduler.wants_step()
    if moment == "hear":
        engine._stages.hear[-1](Obstacle("something happened"))
    if moment == "drop":
        assert engine.abort("nobody") is None
    if moment == "idle":
        assert not engine._stages.idle[-1]()
    assert texts(drain(engine).values()) == expected("a", "bb")
    said = complaint_in(caplog, moment)
    assert said.startswith(
        'stage "third" of trencadis_testing.engines, given in code (plugin "given") raised ValueError'
    )
    assert "Correct it, or do not pass it." in said
    assert engine.stage("third").num_faults == 1


def test_accept_that_raises_refuses_its_request_alone() -> None:
    engine = engine_with(failing("accept"))
    with pytest.raises(RequestRefusedError, match=r"request 'a' was refused: stage .*ValueError: broken accept"):
        engine.add(request("a"))
    engine.add(request("bb"))
    assert texts(drain(engine).values()) == expected("bb")


def test_stage_may_refuse_a_request_as_often_as_it_likes() -> None:
    engine = engine_with(failing("accept", times=5, error=InvalidRequestError))
    for _ in range(5):
        with pytest.raises(InvalidRequestError, match="broken accept"):
            engine.add(request("a"))
    engine.add(request("a"))
    assert engine.stage("third").num_faults == 0


@pytest.mark.parametrize("moment", ["added", "claim"])
def test_request_ends_alone_if_nobody_knows_whether_it_can_run(moment: str) -> None:
    woken: list[str] = []
    engine = engine_with(failing(moment))
    engine.wake_by(lambda: woken.append("woken"))
    engine.add(request("a"))
    engine.add(request("bb"))
    if moment == "added":
        assert woken, "the loop would wait"
    ended = drain(engine)
    assert ended["a"].finish_reason is FinishReason.ERROR
    assert f"broken {moment}" in ended["a"].error
    assert "Correct it" in ended["a"].error
    assert texts([ended["bb"]]) == expected("bb")
    assert engine.inspect().aside == {}
    assert engine._state.blocks.num_used == 0


class Claims(Claim):
    def __init__(self, when: When = When.NOW, num_tokens: int = 0, **own: Any) -> None:
        self.when, self.num_tokens = when, num_tokens
        vars(self).update(own)


class CannotBegin(Claims):
    def begin(self, sequence: Any, blocks: Any, *, num_found: int) -> bool:
        raise OSError("no such disk")

    def unused(self) -> None:
        raise OSError("no such disk")


@pytest.mark.parametrize("when", [When.NOW, When.AFTER_LOAD])
def test_request_whose_claim_cannot_be_begun_ends_alone(when: When) -> None:
    def claim(self: Any, sequence: Any, *, num_found: int) -> Claim | None:
        return CannotBegin(when, 4) if sequence.request.request_id == "a" else None

    engine = engine_with(failing(claim=claim))
    engine.add(request("a"))
    engine.add(request("bb"))
    ended = drain(engine)
    assert "no such disk" in ended["a"].error
    assert "in begin()" in ended["a"].error
    assert texts([ended["bb"]]) == expected("bb")
    assert engine._state.blocks.num_used == 0


def test_claim_that_raises_when_it_is_told_that_it_is_unused_is_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unused(Claims):
        def unused(self) -> None:
            raise OSError("no such disk")

    engine = engine_with(failing(claim=lambda self, sequence, *, num_found: Unused()), num_blocks=4)
    engine.add(request("a"))
    engine.add(request("bb"))
    engine.add(request("ccc"))
    assert texts(drain(engine).values()) == expected("a", "bb", "ccc")
    assert complaint_in(caplog, "unused")


class DropsBadly(Claims):
    def drop(self, sequence: Any) -> None:
        raise OSError("no such disk")


def test_claim_kept_with_a_sequence_is_dropped_whatever_it_raises(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(failing(leaving=lambda self, sequence, leaving: None if leaving.reason else DropsBadly()))
    engine.add(request("a"))
    engine.step()
    engine._state.preempt(engine._state.table.sequence(0))
    assert engine.abort("a") is not None
    drain(engine)
    assert complaint_in(caplog, "drop")
    assert engine._state.blocks.num_used == 0


class ClaimsAll(Stage):
    """Says of each sequence what its request's name asks for."""

    def bind(self, engine: Any) -> None:
        self._state = engine.state

    def claim(self, sequence: Any, *, num_found: int) -> Any:
        match sequence.request.request_id:
            case "type":
                return 5
            case "too many":
                return Claims(num_tokens=len(sequence.tokens))
            case "negative":
                return Claims(num_tokens=-1)
            case "when":
                return Claims(when="now")  # type: ignore[arg-type]
            case "gone":
                return Claims(when=When.GONE)
            case "ended":
                self._state.finish(sequence, FinishReason.ABORT)
            case "moved":
                self._state.set_aside(sequence, "moved", is_queued=True)
        return None


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("type", "returned 5, where a Claim or None"),
        ("too many", "tokens of a sequence, where 12 can be claimed"),
        ("negative", "claims -1 tokens"),
        ("when", "no When"),
        ("gone", "ended that lives"),
        ("moved", "moved the sequence"),
    ],
)
def test_claim_against_the_law_ends_its_request_alone(name: str, complaint: str) -> None:
    engine = engine_with(ClaimsAll)
    engine.add(request(name))
    engine.add(request("bb"))
    ended = drain(engine)
    assert complaint in ended[name].error
    assert texts([ended["bb"]]) == expected("bb")


def test_sequence_that_a_claim_ended_in_silence_is_not_planned(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(ClaimsAll)
    engine.add(request("ended"))
    engine.add(request("bb"))
    assert texts(drain(engine).values()) == expected("bb")
    assert "did not say so" in complaint_in(caplog, "claim")


def test_batch_that_cannot_be_completed_fails_its_step_and_no_text() -> None:
    engine = engine_with(failing("after_build"))
    engine.add(request("a"))
    engine.add(request("bb"))
    assert texts(drain(engine).values()) == expected("a", "bb")
    assert engine.totals.num_failed_steps == 1
    assert engine.stage("third").num_faults == 1


def test_step_that_a_stage_refuses_is_no_fault_of_it() -> None:
    engine = engine_with(failing("after_build", error=BackendError))
    engine.add(request("a"))
    engine.add(request("bb"))
    assert texts(drain(engine).values()) == expected("a", "bb")
    assert (engine.totals.num_failed_steps, engine.stage("third").num_faults) == (1, 0)


@pytest.mark.parametrize(
    ("moment", "answer", "complaint"),
    [
        ("added", lambda self, sequence: None, "it returned None, where str is expected"),
        ("after_build", lambda self, step, batch: 5, "returned 5, where a Batch or None"),
        ("after_step", lambda self, step, output, deltas: None, "returned None, where TokenDeltas"),
        (
            "after_step",
            lambda self, step, output, deltas: attrs.evolve(deltas, token_ids=np.append(deltas.token_ids, np.int32(1))),
            "whose arrays do not fit",
        ),
        (
            "after_step",
            lambda self, step, output, deltas: attrs.evolve(deltas, finished=()),
            "left out that requests have ended: .'a'",
        ),
        ("wants_empty_plan", lambda self: None, "where bool is expected"),
    ],
)
def test_answers_are_held_to_their_laws(
    moment: str, answer: Any, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with(failing(**{moment: answer}))
    engine.add(request("a"))
    if moment == "wants_empty_plan":
        engine._scheduler.wants_step()
    drain(engine)
    assert complaint.replace(".'", "['") in complaint_in(caplog, moment)


@pytest.mark.parametrize("is_undone", [False, True])
def test_blocks_kept_by_a_moment_that_raised_are_freed(is_undone: bool) -> None:
    def leaving(self: Any, sequence: Any, leaving: Any) -> None:
        leaving.num_kept_blocks = 1 if is_undone else len(leaving.blocks) + 1
        if is_undone:
            raise ValueError("too late")

    engine = engine_with(failing(leaving=leaving))
    engine.add(request("a"))
    drain(engine)
    assert engine._state.blocks.num_used == 0
    assert engine.stage("third").num_faults == 1


def test_blocks_that_another_stage_keeps_stay_kept() -> None:
    class Keeps(Stage):
        def leaving(self, sequence: Any, leaving: Any) -> None:
            leaving.num_kept_blocks = 1

    class Frees(Stage):
        def leaving(self, sequence: Any, leaving: Any) -> None:
            leaving.num_kept_blocks = 0

    keeps = StageDefinition(name="keeps", make=lambda _: Keeps(), summary="Keeps.", before={"third"})
    frees = StageDefinition(name="third", make=lambda _: Frees(), summary="Frees.")
    engine = make_engine(stages=[keeps, frees])
    engine.add(request("a"))
    drain(engine)
    assert engine._state.blocks.num_used == 1
    assert engine.stage("third").num_faults == 1


class Watches(Observer):
    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)


@pytest.mark.parametrize("where", ["stats", "gauges", "shown"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("num_unheard_of", 1), ("now_s", 1), ("num_swapped", "many"), ("num_drafted_by_position", ("two",))],
)
def test_number_that_nobody_can_show_is_a_fault_and_is_not_shown(where: str, name: str, value: Any) -> None:
    def after_plan(self: Any, step: Any) -> None:
        if step is not None:
            {"stats": step.stats, "gauges": self.state.gauges, "shown": self.state.shown}[where][name] = value

    def bind(self: Any, engine: Any) -> None:
        self.state = engine.state

    observer = Watches()
    engine = engine_with(failing(after_plan=after_plan, bind=bind), observers=[("watches", observer)])
    engine.add(request("a"))
    assert texts(drain(engine).values()) == expected("a")
    assert observer.steps
    assert engine.stage("third").num_faults >= 1
    assert engine.metrics()


def test_every_number_that_a_stage_may_show_is_shown() -> None:
    numbers = {name: (1,) if kind is tuple else 1 for name, kind in guarded_stage._STATS.items()}

    def after_plan(self: Any, step: Any) -> None:
        if step is not None:
            step.stats.update(numbers)
            self.state.gauges.update(dict.fromkeys(guarded_stage._GAUGES, 1))
            self.state.shown.update(dict.fromkeys(guarded_stage._SHOWN, 0))

    def bind(self: Any, engine: Any) -> None:
        self.state = engine.state

    observer = Watches()
    engine = engine_with(failing(after_plan=after_plan, bind=bind), observers=[("watches", observer)])
    engine.add(request("a"))
    drain(engine)
    assert engine.stage("third").num_faults == 0
    shown = attrs.asdict(observer.steps[0], recurse=False)
    assert {name: shown[name] for name in numbers} == numbers
    assert engine.totals.num_block_swaps == len(observer.steps)


def test_name_of_a_number_is_checked_before_the_first_request() -> None:
    with pytest.raises(
        PluginError, match=r"stage .third. of .* raised ContractError: state.gauges has no 'num_swaped'. Did you mean"
    ):
        engine_with(failing(bind=lambda self, engine: engine.state.gauges.update(num_swaped=0)))


# ------------------------------------------------------------------------------------------------- too many faults


def test_stage_that_fails_again_and_again_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(failing("before_step", times=100))
    engine.add(request("a"))
    assert texts(drain(engine).values()) == expected("a")
    assert engine.stage("third").calls == guarded_stage.MAX_FAULTS
    assert [one.message for one in caplog.records if one.levelno == logging.ERROR] == [
        'stage "third" of trencadis_testing.engines, given in code (plugin "given") raised 3 times in a row in before_step(): it is '
        "switched off for good. Correct it, or do not pass it."
    ]
    assert any('stage "third"' in one.component for one in switched_off())


def test_faults_that_are_not_in_a_row_switch_nothing_off() -> None:
    def before_step(self: Any) -> None:
        self.calls += 1
        if self.calls % 2:
            raise ValueError("every second time")

    engine = engine_with(failing(before_step=before_step))
    engine.add(request("a", max_tokens=20))
    drain(engine)
    assert engine.stage("third").calls > 10
    assert not fault_of(engine).fault


def test_a_moment_that_succeeds_excuses_no_other() -> None:
    engine = engine_with(failing("before_step", times=100, after_plan=lambda self, step: None))
    engine.add(request("a"))
    drain(engine)
    assert fault_of(engine).fault


def test_stage_that_is_off_is_still_told_who_left_and_keeps_nothing() -> None:
    left: list[str] = []

    def leaving(self: Any, sequence: Any, leaving: Any) -> None:
        leaving.num_kept_blocks = len(leaving.blocks)

    own = {"left": lambda self, finished: left.append(finished.request_id), "leaving": leaving}
    engine = engine_with(failing("before_step", times=100, **own))
    engine.add(request("a", max_tokens=10))
    drain(engine)
    assert fault_of(engine).fault
    assert left == ["a"]
    assert engine._state.blocks.num_used == 0


def test_requests_that_waited_for_a_stage_that_is_off_end_in_words() -> None:
    def added(self: Any, sequence: Any) -> str:
        return "waits for ever" if sequence.request.request_id == "a" else ""

    engine = engine_with(failing("before_step", times=100, added=added))
    engine.add(request("a"))
    engine.add(request("bb"))
    ended = drain(engine)
    assert "raised 3 times in a row in before_step(), and the request waited for it" in ended["a"].error
    assert texts([ended["bb"]]) == expected("bb")


def test_sequence_whose_load_a_stage_had_begun_is_computed_when_the_stage_is_off() -> None:
    class Loads(Claims):
        def begin(self, sequence: Any, blocks: Any, *, num_found: int) -> bool:
            self.blocks = blocks
            return True

    def claim(self: Any, sequence: Any, *, num_found: int) -> Claim | None:
        return Loads(When.AFTER_LOAD) if sequence.request.request_id == "a" else None

    engine = engine_with(failing("received", times=100, claim=claim))
    engine.add(request("a"))
    engine.add(request("bb"))
    assert texts(drain(engine).values()) == expected("a", "bb")
    assert engine._state.blocks.num_used == 0


def test_stage_that_guards_requests_is_closed_and_not_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(failing("before_step", times=3, accept=lambda self, request: request))
    engine.add(request("a"))
    assert texts(drain(engine).values()) == expected("a")
    assert engine.stage("third").calls > 3
    with pytest.raises(RequestRefusedError, match=r"raised 3 times in a row in before_step.*cannot be checked"):
        engine.add(request("bb"))
    assert any("every new one is refused" in one.message for one in caplog.records)


# ---------------------------------------------------------------------------------------------------- outside a step


@pytest.mark.parametrize("method", ["metrics", "inspect", "close"])
def test_what_is_asked_outside_a_step_is_contained(method: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(failing(method))
    assert "trencadis_components_switched_off_total" in engine.metrics()
    assert "third" not in engine.inspect().stages
    engine.close()
    assert complaint_in(caplog, method)


@pytest.mark.parametrize("name", ["wants_step", "has_orders", "awaits"])
def test_question_that_raises_counts_as_no(name: str) -> None:
    @property
    def raises(self: Any) -> bool:
        raise ValueError("broken")

    engine = engine_with(failing(**{name: raises}))
    assert not engine.has_work
    engine.add(request("a"))
    assert not engine.is_stalled
    assert texts(drain(engine).values()) == expected("a")


def test_request_of_another_kind_whose_stage_raises_is_refused_alone() -> None:
    def raises(request: Any) -> None:
        raise ValueError("broken")

    engine = engine_with(failing("drop", takes={dict: raises}))
    with pytest.raises(RequestRefusedError, match="a dict was refused: its stage raised ValueError: broken"):
        engine.take({})
    engine.add(request("a"))
    engine.add(request("bb"))
    assert engine.abort("bb") is not None
    assert engine.stage("third").num_faults == 1
    assert texts(drain(engine).values()) == expected("a")


def test_ranks_that_a_stage_lost_are_started_again() -> None:
    executor = FakeExecutor(FakeBackend(eos=-1, max_model_len=64))
    executor.restart = lambda: restarts.append(1)  # type: ignore[attr-defined]
    restarts: list[int] = []
    engine = engine_with(failing("before_step", error=RanksLostError), executor=executor)
    engine.add(request("a"))
    assert texts(drain(engine).values()) == expected("a")
    assert (restarts, engine.stage("third").num_faults) == ([1], 0)


def test_fault_of_a_built_in_stage_ends_the_step() -> None:
    engine = make_engine(explain_steps=4)
    (explain,) = (one for one in engine._stages.all if one.name == "explain")
    assert explain.label == ""
    assert engine._stages.called == engine._stages.all


def test_sequence_that_two_stages_hold_back_waits_for_both() -> None:
    class Holds(Stage):
        def bind(self, engine: Any) -> None:
            self.state = engine.state

        def added(self, sequence: Any) -> str:
            return "held back"

    pair = [StageDefinition(name=name, make=lambda _: Holds(), summary="Holds back.") for name in ("third", "fourth")]
    engine = make_engine(stages=pair)
    engine.add(request("a"))
    sequence = engine._state.table.sequence(0)
    engine._state.resume(sequence, front=False)
    assert sequence.state is SequenceState.ASIDE
    engine._state.resume(sequence, front=False)
    assert sequence.state is SequenceState.WAITING
    assert len(drain(engine)) == 1
