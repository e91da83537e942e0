"""A component that takes too long is named with the time it took, and replaced where something can take its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest

from support.kv.wild_connector import WildConnector, WildScheduler
from trencadis.clock import SimulatedClock
from trencadis.engine.stage import Made
from trencadis.faults import Fallback, switched_off
from trencadis.interfaces import Lookup, SchedulerView, SchedulingPolicy, SupportsHandover, TokenSplit
from trencadis.records import Bucket, FinishReason, Request, SamplingParams, Shape
from trencadis_testing.doubles import AsManyAsMay, ScriptedSpeculator
from trencadis_testing.engines import ExactShapes, OldestFirst, drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


def request(name: str = "a", max_tokens: int = 8) -> Request:
    return Request(request_id=name, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=max_tokens))


def slow(clock: SimulatedClock, took_s: float) -> dict[str, dict[str, Any]]:
    """Return a slow one of each kind, as arguments of ``make_engine``."""

    class SlowPolicy(SchedulingPolicy):
        def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
            clock.advance(took_s)
            return super().split(view, token_budget=token_budget)

    class SlowToTell(SchedulingPolicy):
        def on_added(self, *, slot: int, request: Request) -> None:
            clock.advance(took_s)

    class SlowEviction(OldestFirst):
        def on_free(self, *args: Any, **more: Any) -> None:
            clock.advance(took_s)
            super().on_free(*args, **more)

    class SlowShapes(ExactShapes):
        def bucket_for(self, shape: Shape) -> Bucket:
            clock.advance(took_s)
            return super().bucket_for(shape)

    return {
        "split": {"policy": SlowPolicy()},
        "on_added": {"policy": SlowToTell()},
        "on_free": {"eviction": SlowEviction()},
        "bucket_for": {"bucketing": SlowShapes()},
    }


METHODS = ("split", "on_added", "on_free", "bucket_for")


def num_quarantined(engine: Any) -> int:
    guards = engine._policy, engine._state.blocks.eviction, engine._batches.passes._bucketing
    return sum(guard.num_quarantined for guard in guards)


def texts_of(engine: Any, num_requests: int = 6) -> list[list[int]]:
    texts = []
    for number in range(num_requests):
        engine.add(request(str(number)))
        texts.append(drain(engine)[str(number)].token_ids.tolist())
    return texts


@pytest.mark.parametrize("method", METHODS)
def test_what_takes_ten_budgets_is_replaced_at_once_and_texts_are_equal(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimulatedClock()
    engine = make_engine(clock=clock, fallback=True, **slow(clock, 5.0)[method])
    assert texts_of(engine) == [fake_text(PROMPT, 8)] * 6
    assert num_quarantined(engine) == 1
    assert f"took 5 s in {method}(), over its budget of 0.2 s ([budget] " in caplog.text
    assert clock.now_s() == pytest.approx(5.0), "it was called once"


@pytest.mark.parametrize("method", METHODS)
def test_what_is_slow_three_times_in_a_minute_is_replaced(method: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    engine = make_engine(clock=clock, fallback=True, **slow(clock, 1.0)[method])
    assert texts_of(engine) == [fake_text(PROMPT, 8)] * 6
    assert num_quarantined(engine) == 1
    assert "3 times within 60 s; its fallback takes over" in caplog.text
    assert clock.now_s() == pytest.approx(3.0)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_slow_without_a_fallback_is_named_once_a_minute_and_goes_on(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimulatedClock()
    engine = make_engine(clock=clock, **slow(clock, 5.0)[method])
    assert texts_of(engine) == [fake_text(PROMPT, 8)] * 6
    assert num_quarantined(engine) == 0
    said = [record.getMessage() for record in caplog.records if f"in {method}()" in record.getMessage()]
    assert len(said) == 1
    assert "took 5 s" in said[0]


@pytest.mark.parametrize("slow_part", ["speculator", "length"])
def test_a_slow_drafter_without_a_fallback_ends_speculation_and_no_request(
    slow_part: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimulatedClock()

    def drafts(tokens: Any) -> list[int]:
        clock.advance(20.0 if slow_part == "speculator" else 0.0)
        return fake_text(tokens.tolist(), 3, eos=-1)

    class SlowLength(AsManyAsMay):
        def choose(self, view: Any) -> Any:
            clock.advance(20.0 if slow_part == "length" else 0.0)
            return super().choose(view)

    engine = make_engine(
        clock=clock,
        backend=FakeBackend(eos=-1),
        speculator=Made(label="drafter d", component=ScriptedSpeculator(drafts)),
        draft_length=Made(label="length l", component=SlowLength()),
    )
    engine.add(request("r", 40))
    assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, 40, eos=-1)
    assert clock.now_s() == pytest.approx(100.0 if slow_part == "speculator" else 20.0), "four calls may compile"
    name = "drafter d took 20 s in propose()" if slow_part == "speculator" else "length l took 20 s in choose()"
    assert name in engine.stage("speculation").fault
    assert "Speculation goes off" in caplog.text


# --------------------------------------------------------------------------------------------------------- connectors


def connected(change: Callable[[Any], None], **more: Any) -> tuple[Any, SimulatedClock]:
    clock, wild = SimulatedClock(), WildConnector()
    pair = wild.pair()
    change(pair.scheduler)
    return make_engine(clock=clock, connector=pair, **more), clock


def test_a_slow_connector_is_switched_off_and_named(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    wild = WildConnector()
    pair = wild.pair()
    pair.scheduler.on_computed = lambda **_: clock.advance(1.0)  # type: ignore[method-assign]
    engine = make_engine(clock=clock, connector=pair)
    assert texts_of(engine) == [fake_text(PROMPT, 8)] * 6
    assert engine.stage("transfer").transfers.connector.is_off
    assert clock.now_s() == pytest.approx(3.0)
    assert (
        "the KV connector took 1 s in on_computed(), over its budget of 0.2 s ([budget] kv_connector_ms)" in caplog.text
    )
    assert (
        "is switched off for 60 s; serving goes on without it. Mend it, or choose another in kv_connector.name."
        in caplog.text
    )


def test_a_look_up_that_is_pending_for_ever_ends_at_a_deadline_and_the_prompt_is_computed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    abandoned: list[str] = []

    class Pends(WildScheduler, SupportsHandover):
        def lookup(self, *_: Any, **__: Any) -> Lookup:
            return Lookup(pending=True)

        def on_abandoned(self, request: Request) -> None:
            abandoned.append(request.request_id)

    wild, clock = WildConnector(), SimulatedClock()
    engine = make_engine(clock=clock, connector=attrs.evolve(wild.pair(), scheduler=Pends(wild)))
    engine.add(request("r"))
    for _ in range(59):
        clock.advance(1.0)
        assert not engine.step().finished
    assert not abandoned
    clock.advance(2.0)
    end = drain(engine)["r"]
    assert (end.finish_reason, end.token_ids.tolist()) == (FinishReason.LENGTH, fake_text(PROMPT, 8))
    assert abandoned == ["r"]
    assert "still looking for the prefix of request r after 60 s ([cache] lookup_timeout_s)" in caplog.text
    assert "trencadis_transfer_late_lookups_total 1.0" in engine.metrics()


def test_a_look_up_that_answers_in_time_has_its_time_again_when_it_is_asked_again() -> None:
    answers = iter([True] * 3 + [False] + [True] * 10_000)
    engine, clock = connected(lambda side: setattr(side, "lookup", lambda *_, **__: Lookup(pending=next(answers))))
    engine.add(request("r"))
    for _ in range(3):
        clock.advance(15.0)
        engine.step()
    assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, 8)
    assert engine.stage("transfer").transfers.num_late_lookups == 0


# --------------------------------------------------------------------------------------------- tried again after a while


class SlowAtFirst(SchedulingPolicy):
    """Takes 3 s for each split until it is made anew."""

    made: ClassVar[list[SlowAtFirst]] = []

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock, self.known = clock, set[int]()
        self.made.append(self)

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        if self.made[0] is self:
            self.clock.advance(3.0)
        return TokenSplit(decode=token_budget, prefill=token_budget)

    def on_added(self, *, slot: int, request: Request) -> None:
        self.known.add(slot)


def test_a_slow_policy_is_made_anew_after_a_while_and_told_of_the_live_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SimulatedClock()
    SlowAtFirst.made.clear()
    engine = make_engine(clock=clock, policy=SlowAtFirst(clock), backend=FakeBackend(eos=-1, max_model_len=512))
    guarded = engine._policy
    guarded._make_fallback = Fallback("plain", SchedulingPolicy, lambda: SlowAtFirst(clock))
    engine.add(request("a", 200))
    for _ in range(5):
        engine.step()
    assert type(guarded.strategy) is SchedulingPolicy
    assert [one.cause for one in switched_off() if one.component == guarded._resting[0]]
    assert "its fallback takes over for 60 s" in caplog.text
    clock.advance(61.0)
    engine.step()
    assert guarded.strategy is SlowAtFirst.made[1]
    assert SlowAtFirst.made[1].known == {0}
    assert guarded.num_quarantined == 1
    assert not guarded.is_replaced
    assert drain(engine)["a"].token_ids.tolist() == fake_text(PROMPT, 200, eos=-1)


def test_a_slow_drafter_drafts_again_after_a_while() -> None:
    clock, asked = SimulatedClock(), []

    def drafts(tokens: Any) -> list[int]:
        asked.append(len(tokens))
        clock.advance(20.0 if len(asked) <= 5 else 0.0)
        return fake_text(tokens.tolist(), 3, eos=-1)

    engine = make_engine(
        clock=clock, backend=FakeBackend(eos=-1, max_model_len=512), speculator=ScriptedSpeculator(drafts)
    )
    engine.add(request("r", 200))
    while len(asked) < 5 or not engine.stage("speculation").fault:
        engine.step()
    for _ in range(5):
        engine.step()
    assert len(asked) == 5
    clock.advance(61.0)
    engine.step()
    assert len(asked) == 6
    assert not engine.stage("speculation").fault
    assert engine.stage("speculation").num_quarantined == 1
    assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, 200, eos=-1)
