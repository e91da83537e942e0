from __future__ import annotations

import pytest

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
    assert engine._state.blocks.num_used == 0


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


def test_slow_observer_is_switched_off() -> None:
    clock = SimulatedClock()
    calls = []

    class Slow(Observer):
        def on_step(self, stats: StepStats) -> None:
            calls.append(stats.step)
            clock.advance(1.0)

    engine = make_engine(observers=[("slow", Slow())], clock=clock, backend=FakeBackend(eos=-1, max_model_len=256))
    engine.add(request("a", max_tokens=200))
    drain(engine)
    assert len(calls) == 100


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
