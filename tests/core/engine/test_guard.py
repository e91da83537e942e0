from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from trencadis import interfaces
from trencadis.activity import ACTIVITY, ActivityView
from trencadis.clock import SimulatedClock
from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.engine.guard import Guarded
from trencadis.errors import ContractError, StepFailedError
from trencadis.interfaces import (
    AcceptanceRule,
    BucketingStrategy,
    DraftLength,
    EvictionPolicy,
    KVSchedulerSide,
    KVWorkerSide,
    Lookup,
    Move,
    Observer,
    Router,
    Sampled,
    Sampler,
    SamplingContext,
    SchedulerView,
    SchedulingPolicy,
    Speculator,
    SupportsHandover,
    SupportsMoves,
    SupportsRemotePrefill,
    SupportsSteadySteps,
    TokenSplit,
    Verification,
)
from trencadis.interfaces.laws import legal, rules_of
from trencadis.records import (
    Bucket,
    ConnectorReport,
    DraftDistributions,
    Drafts,
    FailedLoad,
    FirstToken,
    Phase,
    Request,
    RowError,
    SamplingParams,
    Shape,
    StepStats,
)
from trencadis_testing.engines import OldestFirst, drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.speculation import draft_view

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


class Raises(SchedulingPolicy):
    def order(self, view: SchedulerView):
        raise KeyError("a bug in a plugin")


def test_policy_knows_a_content_by_one_id_wherever_it_moves() -> None:
    policy = OldestFirst()
    guarded = GuardedEviction("eviction", policy)
    guarded.on_free([1, 2, 3], depths=[0, 0, 0], now_s=0.0)
    guarded.exchange([(1, 7), (2, 3)])
    assert guarded.victims(1, candidates={7, 3, 2}) == [7]
    guarded.on_hit([3], now_s=0.0)
    assert list(policy._candidates) == [3]
    guarded.exchange([(7, 1)])
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
    guarded.exchange([(1, 9)])
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


# ------------------------------------------------------------------------------------------------- laws of the contracts


@attrs.frozen
class Case:
    """Answers of one method of a contract: the first is right, each other one breaks its law."""

    method: Callable[..., Any]
    answers: tuple[Any, ...]
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = {}
    says: str = ""


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


VIEW = SimpleNamespace(waiting=ints(4, 2, 7))
SHAPE = Shape(2, 3, 4, Phase.PREFILL)
DRAFT_VIEW = draft_view([[1, 2], [3]], most=[2, 1])
LENGTH_VIEW = SimpleNamespace(max_draft_tokens=ints(2, 1))
REPLICAS = SimpleNamespace(is_healthy=np.array([True, False, True]))
GOOD = Drafts(num_drafts=ints(2, 0), token_ids=ints(5, 6))
TREE = Drafts(num_drafts=ints(2, 1), token_ids=ints(5, 6, 7), parents=ints(-1, -1, -1))
DRAWN = DraftDistributions(rows=ints(0, 0), probabilities=np.ones((1, 9)))
NO_INDICES = (1, 3, -1, "0", 0.0, None, True)

CASES = (
    Case(
        SchedulingPolicy.admit,
        ("", None, True, "a\nb", "x" * 1001),
        (request(),),
        {"num_waiting": 0, "num_waiting_tokens": 0},
    ),
    Case(
        SchedulingPolicy.admit_tenant,
        ("full", None, 1),
        (request(),),
        {"num_waiting": 0, "num_waiting_tokens": 0},
        "is no text",
    ),
    Case(SchedulingPolicy.order, (ints(7, 4, 2), ints(7, 4), ints(7, 4, 4), [7.0, 4.0, 2.0], None, "abc"), (VIEW,)),
    Case(
        SchedulingPolicy.split,
        (TokenSplit(0, 5), TokenSplit(-1, 5), TokenSplit(5, -1), TokenSplit(1.5, 1), None),
        (VIEW,),
        {"token_budget": 5},
    ),
    Case(SchedulingPolicy.chunk, (3, 4, -1, "3", None), (VIEW,), {"slot": 1, "num_remaining": 9, "token_budget": 3}),
    Case(SchedulingPolicy.victim, (2, 3, -1, None), (VIEW,), {"candidates": ints(4, 2)}, "no candidate of [4, 2]"),
    Case(SchedulingPolicy.preempt_for, (-1, 3, -2, None), (VIEW,), {"slot": 1, "candidates": ints(4, 2)}, "and not -1"),
    Case(SupportsSteadySteps.steady_steps, (4, 0, 1.0, True, None), (VIEW,), {}, "no whole number from 1 on"),
    Case(EvictionPolicy.victims, ([1, 2], [1], [1, 1], [1, 2, 3], [1.0, 2.0], None), (2,)),
    Case(
        BucketingStrategy.bucket_for,
        (Bucket.of(SHAPE), Bucket(2, 2, 4, Phase.PREFILL), SHAPE, None, "wide"),
        (SHAPE,),
        {},
        "does not cover it",
    ),
    Case(
        DraftLength.choose, (ints(2, 0), ints(3, 0), ints(0, -1), ints(1), [1, 1], np.array([1.0, 1.0])), (LENGTH_VIEW,)
    ),
    Case(DraftLength.rest, (0, -1, 2.0, None)),
    Case(
        Speculator.propose,
        (
            GOOD,
            None,
            attrs.evolve(GOOD, num_drafts=ints(2)),
            attrs.evolve(GOOD, num_drafts=np.array([[2, 0]])),
            attrs.evolve(GOOD, token_ids=np.array([5.0, 6.5])),
            attrs.evolve(GOOD, token_ids=[5, 6]),
            attrs.evolve(GOOD, token_ids=ints(5)),
            attrs.evolve(GOOD, parents=ints(-1)),
            attrs.evolve(GOOD, parents=ints(-2, 0)),
            attrs.evolve(GOOD, distributions=attrs.evolve(DRAWN, rows=ints(0))),
            attrs.evolve(GOOD, distributions=attrs.evolve(DRAWN, rows=ints(0, 1))),
            attrs.evolve(GOOD, distributions=attrs.evolve(DRAWN, probabilities=np.ones(9))),
            Drafts(num_drafts=ints(3, 0), token_ids=ints(5, 6, 7)),
            Drafts(num_drafts=ints(3, -1), token_ids=ints(5, 6)),
        ),
        (DRAFT_VIEW,),
    ),
    Case(
        Speculator.propose, (TREE, attrs.evolve(TREE, parents=ints(1, -1, -1))), (DRAFT_VIEW,), {}, "before its parent"
    ),
    Case(Speculator.propose, (GOOD, TREE), (draft_view([[1], [2]], most=2, linear_only=True),), {}, "must be linear"),
    Case(Router.peek, (2, *NO_INDICES), (request(), REPLICAS), {}, "no healthy replica of 3"),
    Case(Router.select, (0, *NO_INDICES), (request(), REPLICAS), {}, "no healthy replica of 3"),
    Case(SupportsMoves.moves, ([Move(1, 0)], None, "ab", [1], [(1, 2, 3)], [(1, 0.0)], [(True, 0)]), (VIEW, REPLICAS)),
)
LOGITS = torch.zeros((2, 4))
IDS = torch.tensor([0, 3])
CONTEXT = SamplingContext(rows=(0, 1), positions=(0, 0), tokens=torch.ones((2, 8), dtype=torch.int32))
SAMPLED = (
    Sampled(token_ids=IDS),
    None,
    IDS,
    Sampled(token_ids=IDS.int()),
    Sampled(token_ids=IDS[:1]),
    Sampled(token_ids=IDS.to("meta")),
    Sampled(token_ids=torch.tensor([0, 4])),
    Sampled(token_ids=torch.tensor([0, -1])),
    Sampled(token_ids=IDS, row_errors=(RowError(index=2, message="no"),)),
    Sampled(token_ids=IDS, row_errors=("no",)),  # type: ignore[arg-type] # what the contract forbids
)
TARGET = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0]]])
DRAFTED = Verification(
    tokens=torch.tensor([[1, 3]]),
    parents=torch.tensor([[0, 1]]),
    num_drafts=torch.tensor([2]),
    is_linear=True,
    target=TARGET,
)
STOPS = torch.tensor([1])
CASES += (
    Case(Sampler.sample, SAMPLED, (LOGITS, CONTEXT)),
    Case(Sampler.verify, SAMPLED, (LOGITS, CONTEXT, lambda _: IDS)),
    Case(
        AcceptanceRule.accept,
        (
            torch.tensor([[0.5, 0.0]]),
            torch.tensor([[0.5, 0.1]]),  # the model does not choose it, and the rule is lossless
            torch.tensor([[1.1, 0.0]]),
            torch.tensor([[-0.1, 0.0]]),
            torch.tensor([[math.nan, 0.0]]),
            torch.tensor([[0.5]]),
            torch.tensor([[1, 0]]),
            torch.tensor([[0.5, 0.0]], device="meta"),
            [[0.5, 0.0]],
            None,
        ),
        (DRAFTED,),
        {},
        "accept() returned ",
    ),
    Case(
        AcceptanceRule.last,
        (
            torch.tensor([[0.6, 0.0, 0.4, 0.0]]),
            torch.tensor([[0.0, 1.0, 0.0, 0.0]]),  # the model gives it no chance, and the rule is lossless
            torch.tensor([[0.5, 0.0, -0.5, 0.0]]),
            torch.tensor([[math.inf, 0.0, 0.0, 0.0]]),
            torch.zeros((1, 4)),
            torch.ones((1, 3)),
            None,
        ),
        (DRAFTED, STOPS),
        {},
        "last() ",
    ),
)
FAILED = FailedLoad(transfer_id=1, num_valid_tokens=0, cause="evicted")
ASKED = {"block_hashes": (b"h" * 32,), "num_local_tokens": 0}
CASES += (
    Case(
        KVSchedulerSide.lookup,
        (
            Lookup(num_tokens=4, transfer_id=1, first_token=FirstToken(token_id=1)),
            None,
            7,
            Lookup(num_tokens="many", transfer_id=1),  # type: ignore[arg-type] # what the contract forbids, here and below
            Lookup(num_tokens=-4, transfer_id=1),
            Lookup(num_tokens=4, transfer_id=[1]),  # type: ignore[arg-type]
            Lookup(num_tokens=4, transfer_id=1, timeout_s=math.nan),
            Lookup(num_tokens=4, transfer_id=1, timeout_s="soon"),  # type: ignore[arg-type]
            Lookup(num_tokens=4, transfer_id=1, num_cached_tokens=-4),
            Lookup(num_tokens=4, transfer_id=1, num_cached_tokens=2.5),  # type: ignore[arg-type]
            Lookup(num_tokens=4, transfer_id=1, first_token=3),  # type: ignore[arg-type]
        ),
        (request(),),
        ASKED,
    ),
    Case(KVSchedulerSide.on_finished, (None, [1], "1"), (request(),), {"blocks": [1]}, "int | None is expected"),
    Case(KVSchedulerSide.on_failed, ("retry", "no", None, ["retry"]), (request(), FAILED), {}, "are allowed"),
    Case(KVSchedulerSide.take_message, (b"", None, "text"), says="bytes is expected"),
    Case(SupportsHandover.finished_params, ({"a": [1]}, 1, {"a": object()}, {"a": math.nan}), (request(),)),
    Case(SupportsRemotePrefill.take_requests, ((request(),), [1], None), says=""),
    Case(SupportsRemotePrefill.take_withdrawn, (("r",), [1], None), says=""),
    Case(
        KVWorkerSide.poll,
        (
            ConnectorReport(loaded=(1,), failed=(FAILED,)),
            None,
            7,
            ConnectorReport(loaded=("a",)),  # type: ignore[arg-type]
            ConnectorReport(released=([1],)),  # type: ignore[arg-type]
            ConnectorReport(failed=(1,)),  # type: ignore[arg-type]
            ConnectorReport(failed=(FailedLoad(transfer_id=1, num_valid_tokens="all", cause=""),)),  # type: ignore[arg-type]
            ConnectorReport(messages=("text",)),  # type: ignore[arg-type]
        ),
    ),
)
CASES += (Case(Observer.metrics, ("", b"mine 1\n", None, {"mine": 1}, 3), says="which is no text"),)
BREACHES = [(case, number) for case in CASES for number in range(1, len(case.answers))]


def contract_of(method: Callable[..., Any]) -> type:
    contract: type = getattr(interfaces, method.__qualname__.partition(".")[0])
    return contract


def component(case: Case, answer: Any) -> Any:
    """Return what answers one method so, or raises it."""

    def respond(_: object, *args: object, **named: object) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    contract = contract_of(case.method)
    declared = {"lossless": True}
    stubs = dict.fromkeys(contract.__abstractmethods__, respond)  # type: ignore[attr-defined] # it is an ABC
    return type("Mutant", (contract,), {**stubs, case.method.__name__: respond, **declared})()


def guarded(case: Case, answer: Any, *fallback: Any) -> Guarded[Any]:
    make_fallback = (lambda: component(case, fallback[0])) if fallback else None
    return Guarded(contract_of(case.method), "policy mine of p 1.0", component(case, answer), make_fallback)


def asked(guard: Guarded[Any], case: Case) -> Any:
    return getattr(guard.ask, case.method.__name__)(*case.args, **case.named)


def same(one: Any, other: Any) -> bool:
    return one is other or bool(np.array_equal(one, other))


@pytest.mark.representatives(len(CASES))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method.__qualname__)
def test_a_legal_answer_passes(case: Case) -> None:
    guard = guarded(case, case.answers[0])
    assert same(asked(guard, case), case.answers[0])
    assert not guard.num_quarantined


@pytest.mark.representatives(len(BREACHES))
@pytest.mark.parametrize(
    ("case", "number"), BREACHES, ids=lambda one: one if isinstance(one, int) else one.method.__qualname__
)
def test_an_answer_against_the_law_puts_the_fallback_in_place_or_ends_the_step(
    case: Case, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StepFailedError, match=r"^policy mine of p 1.0 raised .*Error: ") as error:
        asked(guarded(case, case.answers[number]), case)
    assert case.says in str(error.value)
    guard = guarded(case, case.answers[number], case.answers[0])
    assert same(asked(guard, case), case.answers[0])
    assert (guard.num_quarantined, guard.is_replaced) == (1, True)
    assert "its fallback takes over for good" in caplog.text


def test_every_law_has_an_answer_that_breaks_it() -> None:
    laws = {
        f"{contract.__name__}.{name}"
        for contract in vars(interfaces).values()
        if isinstance(contract, type)
        for name, rule in rules_of(contract).items()
        if rule.law is not None
    }
    assert laws == {case.method.__qualname__ for case in CASES}


def test_a_conformance_kit_asks_the_same_laws() -> None:
    sizes = {"slot": 1, "num_remaining": 9, "token_budget": 3}
    assert legal(SchedulingPolicy.chunk, np.int64(3), VIEW, **sizes) == 3
    with pytest.raises(ContractError, match=r"chunk\(\) returned 4, allowed are 0 to 3"):
        legal(SchedulingPolicy.chunk, 4, VIEW, **sizes)


def test_a_method_left_at_its_default_is_called_as_it_is() -> None:
    policy = SchedulingPolicy()
    assert Guarded(SchedulingPolicy, "it", policy).ask.chunk == policy.chunk


def test_what_is_told_is_not_told_again_to_the_fallback() -> None:
    told: list[int] = []

    class Forgets(SchedulingPolicy):
        def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
            raise KeyError(slot)

    class Notes(SchedulingPolicy):
        def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
            told.append(slot)

    guard = Guarded(SchedulingPolicy, "it", Forgets(), Notes)
    for slot in (1, 2):
        guard.ask.on_finished(slot=slot, tenant=0, num_output_tokens=0)
    assert told == [2]


def test_a_router_that_leaves_select_to_peek_is_guarded_in_both() -> None:
    peek = next(case for case in CASES if case.method is Router.peek)
    guard = guarded(peek, ValueError("no"), 2)
    assert guard.ask.select(*peek.args) == 2
