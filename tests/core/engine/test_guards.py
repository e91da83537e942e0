from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest

from trencadis.activity import ACTIVITY, ActivityView
from trencadis.clock import SimulatedClock
from trencadis.engine.guards import GuardedEviction
from trencadis.errors import RequestRefusedError
from trencadis.interfaces import Observer, SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Bucket, FinishReason, Request, SamplingParams, Shape, StepStats
from trencadis_testing.engines import ExactShapes, OldestFirst, drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


class Raises(SchedulingPolicy):
    def order(self, view: SchedulerView):
        raise KeyError("a bug in a plugin")


class Permutes(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return view.waiting[:-1]


class Greedy(SchedulingPolicy):
    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        return token_budget + 1


class Negative(SchedulingPolicy):
    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        return TokenSplit(-1, 5)


@pytest.mark.parametrize("policy", [Raises, Permutes, Greedy, Negative])
def test_faulty_policy_is_replaced_by_its_fallback_and_no_request_suffers(policy: type[SchedulingPolicy]) -> None:
    engine = make_engine(policy=policy(), fallback=True)
    engine.add(request("a"))
    engine.add(request("b", PROMPT[:5]))
    assert drain(engine)["b"].token_ids.tolist() == fake_text(PROMPT[:5], 8)


@pytest.mark.parametrize("policy", [Raises, Permutes, Greedy, Negative])
def test_faulty_policy_without_fallback_ends_requests_with_its_name(policy: type[SchedulingPolicy]) -> None:
    engine = make_engine(policy=policy())
    engine.add(request("a"))
    end = drain(engine)["a"]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error.startswith("scheduling raised ")
    assert engine.inspect().blocks.num_used == 0


@pytest.mark.parametrize("method", ["admit", "admit_tenant"])
@pytest.mark.parametrize("answer", [None, True])
def test_refusal_that_is_no_text_is_the_policy_s_fault(method: str, answer: object) -> None:
    policy = type(
        "Policy", (SchedulingPolicy,), {"order": lambda _, view: view.waiting, method: lambda _, *a, **k: answer}
    )
    says = rf"ContractError: {method}\(\) returned {answer}, which is no text"
    with pytest.raises(RequestRefusedError, match=says):
        make_engine(policy=policy()).add(request("a"))
    engine = make_engine(policy=policy(), fallback=True)
    engine.add(request("a"))
    assert drain(engine)["a"].token_ids.tolist() == fake_text(PROMPT, 8)


class TooSmall(ExactShapes):
    def bucket_for(self, shape: Shape) -> Bucket:
        return Bucket(shape.batch_size, max(1, shape.query_len - 1), 0, shape.phase)


def test_bucket_that_does_not_cover_is_never_used() -> None:
    engine = make_engine(bucketing=TooSmall(), fallback=True)
    engine.add(request("a"))
    assert drain(engine)["a"].token_ids.tolist() == fake_text(PROMPT, 8)
    engine = make_engine(bucketing=TooSmall())
    engine.add(request("a"))
    assert "does not cover" in drain(engine)["a"].error


def test_victim_that_is_no_candidate_is_never_evicted() -> None:
    class Wrong(OldestFirst):
        def victims(self, num_blocks: int) -> list[int]:
            return [0] * num_blocks

    engine = make_engine(eviction=Wrong(), num_blocks=12, fallback=True, backend=FakeBackend(max_model_len=48))
    for i in range(8):
        prompt = tuple((i * 13 + j) % 97 for j in range(20))
        engine.add(request(str(i), prompt))
        assert drain(engine)[str(i)].token_ids.tolist() == fake_text(prompt, 8)
    assert engine._state.blocks._eviction.num_quarantined == 1


def test_policy_knows_a_content_by_one_id_wherever_it_moves() -> None:
    policy = OldestFirst()
    guarded = GuardedEviction("eviction", policy)
    guarded.on_free([1, 2, 3], depths=[0, 0, 0], now_s=0.0)
    guarded.swap([(1, 7), (2, 3)])
    assert guarded.victims(1, candidates={7, 3, 2}) == [7]
    guarded.on_hit([3], now_s=0.0)
    assert list(policy._candidates) == [3]
    guarded.swap([(7, 1)])
    guarded.forget([2])
    assert not policy._candidates
    guarded.on_free([1], depths=[0], now_s=0.0)
    assert list(policy._candidates) == [1], "swapped back, a block is called by its own id"


def test_fallback_of_an_eviction_policy_learns_the_ids_in_force() -> None:
    class Wrong(OldestFirst):
        def victims(self, num_blocks: int) -> list[int]:
            return [-1] * num_blocks

    guarded = GuardedEviction("eviction", Wrong(), OldestFirst)
    guarded.on_free([1, 2], depths=[0, 0], now_s=0.0)
    guarded.swap([(1, 9)])
    assert sorted(guarded.victims(2, candidates={9, 2})) == [2, 9]


def test_observer_that_raises_is_contained_and_counted() -> None:
    seen: list[StepStats] = []

    class Bad(Observer):
        def on_step(self, stats: StepStats) -> None:
            raise ValueError("no")

    class Good(Observer):
        def on_step(self, stats: StepStats) -> None:
            seen.append(stats)

    engine = make_engine(observers=[("bad", Bad()), ("good", Good())])
    engine.add(request("a"))
    drain(engine)
    assert engine.totals.num_observer_failures == len(seen) > 0
    assert sum(stats.num_emitted_tokens for stats in seen) == 8
    assert all(s.num_free_blocks + s.num_cached_blocks + s.num_used_blocks == 64 for s in seen)


@pytest.mark.parametrize(("took_s", "num_calls"), [(3.0, 1), (0.06, 18), (0.006, 168)])
def test_observer_is_switched_off_when_it_has_twice_taken_what_100_calls_may_take(
    took_s: float, num_calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimulatedClock()
    calls = []

    class Slow(Observer):
        def on_step(self, stats: StepStats) -> None:
            calls.append(stats.step)
            clock.advance(took_s)

    engine = make_engine(observers=[("slow", Slow())], clock=clock, backend=FakeBackend(eos=-1, max_model_len=256))
    engine.add(request("a", max_tokens=200))
    drain(engine)
    assert len(calls) == num_calls
    assert "slow took" in caplog.text
    assert "it is switched off for 60 s" in caplog.text


def test_observer_that_stumbles_once_goes_on() -> None:
    clock = SimulatedClock()
    calls = []

    class Stumbles(Observer):
        def on_step(self, stats: StepStats) -> None:
            calls.append(stats.step)
            clock.advance(0.6 if len(calls) == 7 else 0.0001)

    engine = make_engine(observers=[("o", Stumbles())], clock=clock, backend=FakeBackend(eos=-1, max_model_len=512))
    engine.add(request("a", max_tokens=200))
    drain(engine)
    assert len(calls) == 200


class NeverPrefills(SchedulingPolicy):
    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        return 0


class PausesEveryOtherStep(SchedulingPolicy):
    num_calls = 0

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        self.num_calls += 1
        return TokenSplit(decode=0, prefill=0) if self.num_calls % 2 else super().split(view, token_budget=token_budget)


def test_policy_that_pauses_between_steps_is_left_alone() -> None:
    engine = make_engine(policy=PausesEveryOtherStep(), async_scheduling=False)
    engine.add(request("a"))
    assert drain(engine)["a"].token_ids.tolist() == fake_text(PROMPT, 8)


@pytest.mark.parametrize("fallback", [False, True])
def test_policy_that_schedules_nothing_is_replaced_or_named(fallback: bool) -> None:
    engine = make_engine(policy=NeverPrefills(), fallback=fallback)
    engine.add(request("a"))
    end = drain(engine, 30)["a"]
    if fallback:
        assert end.token_ids.tolist() == fake_text(PROMPT, 8)
    else:
        assert "scheduled nothing twice in a row with 0 sequences running and 1 waiting" in end.error


class Leaves(SchedulingPolicy):
    """Raises what no ``except Exception`` sees."""

    def __init__(self, error: BaseException, method: str) -> None:
        self.error, self.method = error, method

    def _called(self, method: str) -> None:
        if method == self.method:
            raise self.error

    def admit(self, *_: object, **more: object) -> str:
        self._called("admit")
        return ""

    def on_added(self, **more: object) -> None:
        self._called("on_added")

    def order(self, view: SchedulerView):
        self._called("order")
        return view.waiting

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        self._called("split")
        return super().split(view, token_budget=token_budget)

    def on_finished(self, **more: object) -> None:
        self._called("on_finished")


@pytest.mark.parametrize("method", ["admit", "on_added", "order", "split", "on_finished"])
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), type("Own", (BaseException,), {})()])
def test_a_policy_that_wants_to_end_the_process_is_replaced(
    method: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(policy=Leaves(error, method), fallback=True)
    for name in "abc":
        engine.add(request(name))
        assert drain(engine)[name].token_ids.tolist() == fake_text(PROMPT, 8)
    assert engine._policy.num_quarantined == 1
    assert f"scheduling raised {type(error).__name__}" in caplog.text


def test_ctrl_c_during_a_call_of_a_policy_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    # A shell may have started these tests with Ctrl-C ignored.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    engine = make_engine(policy=Leaves(KeyboardInterrupt(), "order"), fallback=True)
    engine.add(request("a"))
    with pytest.raises(KeyboardInterrupt):
        drain(engine)


def test_an_interrupt_that_no_user_can_have_sent_is_the_policy_s() -> None:
    """An engine's thread gets no Ctrl-C."""
    texts: list[list[int]] = []

    def run() -> None:
        engine = make_engine(policy=Leaves(KeyboardInterrupt(), "order"), fallback=True)
        engine.add(request("a"))
        texts.append(drain(engine)["a"].token_ids.tolist())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert texts == [fake_text(PROMPT, 8)]


class Floods(SchedulingPolicy):
    """Answers with more than anybody can print."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def order(self, view: SchedulerView):
        return self.answer


class Unprintable:
    """An answer that cannot be printed."""

    def __repr__(self) -> str:
        raise AssertionError("printed")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("answer", [[7] * 5_000_000, np.zeros(5_000_000, np.int32), "x" * 5_000_000, Unprintable()])
def test_a_huge_answer_is_not_printed(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(policy=Floods(answer), fallback=True)
    engine.add(request("a"))
    assert drain(engine)["a"].token_ids.tolist() == fake_text(PROMPT, 8)
    assert engine._policy.num_quarantined == 1
    assert len(caplog.text) < 10_000
    engine = make_engine(policy=Floods(answer))
    engine.add(request("a"))
    assert len(drain(engine)["a"].error) < 1000


def test_the_policy_that_is_being_called_can_be_read_from_outside() -> None:
    seen: list[tuple[str, ...]] = []
    view = ActivityView()
    ACTIVITY.share(view.file)

    class Looks(SchedulingPolicy):
        def split(self, view_: SchedulerView, *, token_budget: int) -> TokenSplit:
            seen.append(view.read().calls)
            return super().split(view_, token_budget=token_budget)

    engine = make_engine(policy=Looks())
    engine.add(request("a"))
    drain(engine)
    assert seen[0] == ("scheduling",)
    assert view.read().calls == ()
    view.close_file()


def test_a_policy_that_fails_every_step_is_logged_with_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(policy=Raises())
    for number in range(300):
        engine.add(request(str(number)))
        assert "KeyError: 'a bug in a plugin'" in drain(engine)[str(number)].error
    assert caplog.text.count("Traceback") == 1
    assert "scheduling raised KeyError: 'a bug in a plugin'. Mend or replace the component" in caplog.text
    assert len(caplog.records) < 5


@pytest.mark.parametrize("budget", [10**30, 1 << 40])
def test_a_budget_beyond_the_step_s_is_the_step_s(budget: int) -> None:
    class Generous(SchedulingPolicy):
        def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
            return TokenSplit(budget, budget)

    engine = make_engine(policy=Generous())
    engine.add(request("a"))
    assert drain(engine)["a"].token_ids.tolist() == fake_text(PROMPT, 8)


@pytest.mark.parametrize("wrong", [lambda shape: None, lambda shape: shape, lambda shape: "wide enough"])
def test_what_is_no_bucket_is_never_used(wrong: Callable[[Shape], object]) -> None:
    class Confused(ExactShapes):
        def bucket_for(self, shape: Shape) -> Bucket:
            return wrong(shape)  # type: ignore[return-value] # what the contract forbids

    engine = make_engine(bucketing=Confused(), fallback=True)
    engine.add(request("a"))
    assert drain(engine)["a"].token_ids.tolist() == fake_text(PROMPT, 8)
    assert engine._builder.passes._bucketing.num_quarantined == 1


def test_victims_that_are_no_whole_numbers_are_never_evicted() -> None:
    class Fractions(OldestFirst):
        def victims(self, num_blocks: int) -> list[int]:
            return [float(block) for block in super().victims(num_blocks)]  # type: ignore[misc] # what the contract forbids

    guarded = GuardedEviction("eviction", Fractions(), OldestFirst)
    guarded.on_free([1, 2], depths=[0, 0], now_s=0.0)
    assert guarded.victims(1, candidates={1, 2}) == [1]
    assert guarded.num_quarantined == 1
