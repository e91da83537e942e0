"""Requests that a router moves between replicas: texts are those of requests that stay, and what cannot be moved is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from support.core.replicas import PROMPT, TEXT, Fleet
from support.core.replicas import request_of as request
from trencadis.api import build_engine, load_with_plugins
from trencadis.clock import SimulatedClock
from trencadis.config.schema import Config, ParallelConfig, RouterConfig
from trencadis.errors import ContractError
from trencadis.interfaces import LiveRequests, Move, ReplicaViews, RoutingRequest, SupportsMoves
from trencadis.records import EmbeddingRequest, EngineLoad, FinishReason, Request, SamplingParams
from trencadis_remote.replicas.connect import make_mover
from trencadis_remote.replicas.guarded_router import GuardedRouter, LeastLive
from trencadis_remote.replicas.mover import LiveRow, Mover
from trencadis_remote.replicas.routing import Routing
from trencadis_testing.doubles import ScriptedSpeculator


class Scripted(LeastLive, SupportsMoves):
    """Asks for the moves that the test sets, once; keeps what it was shown and told."""

    moves_period_s = 1.0

    def __init__(self) -> None:
        self.asks: Any = []
        self.shown: list[dict[str, Any]] = []
        self.told: list[tuple[str, int]] = []

    def moves(self, live: LiveRequests, replicas: ReplicaViews) -> Sequence[Move]:
        names = ("replica", "num_prompt_tokens", "num_output_tokens", "num_moves", "target", "priority", "is_movable")
        self.shown.append({name: getattr(live, name).tolist() for name in names} | {"tenants": live.tenants})
        asks, self.asks = self.asks, []
        if isinstance(asks, BaseException):
            raise asks
        return asks  # type: ignore[no-any-return]

    def select(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        self.told.append(("selected", chosen := super().select(request, replicas)))
        return chosen

    def on_moved(self, request: RoutingRequest, replica: int) -> None:
        self.told.append((f"moved after {len(request.token_ids)}", replica))

    def on_finished(self, request: RoutingRequest, replica: int) -> None:
        self.told.append(("finished", replica))


def ask(one: Fleet, *moves: tuple[int, int]) -> None:
    """Have the router ask for moves when the next message comes."""
    one.mover._router.strategy.asks = [Move(*move) for move in moves]  # type: ignore[union-attr]
    one.clock.advance(1.0)


def rows(one: Fleet) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = one.ask("replicas")["replicas"]
    return table


@pytest.mark.parametrize("num_turns", [0, 1, 2, 7, 20])
def test_a_moved_request_goes_on_elsewhere_after_the_tokens_that_came(
    fleet: Callable[..., Fleet], num_turns: int
) -> None:
    router = Scripted()
    one = fleet(2, router)
    slots = {name: one.client.add(request(name)) for name in "abcd"}
    for _ in range(num_turns):
        one.turn()
    ask(one, (0, 1), (3, 0))
    one.until(lambda: one.where("a") == 1 and one.where("d") == 0)
    one.until(lambda: len(one.finished) == 4)
    assert {name: one.tokens[slot] for name, slot in slots.items()} == dict.fromkeys("abcd", TEXT)
    assert {tuple(end.token_ids.tolist()) for end in one.finished.values()} == {tuple(TEXT)}
    assert {end.finish_reason for end in one.finished.values()} == {FinishReason.LENGTH}
    assert [(row["num_rebalanced"], row["num_moved"], row["num_live"]) for row in rows(one)] == [(1, 0, 0)] * 2
    assert [row["num_placed"] for row in rows(one)] == [3, 3]


def test_a_moved_request_says_what_was_cached_where_it_first_ran(fleet: Callable[..., Fleet]) -> None:
    """The first replica has its prompt, the second has not."""
    one = fleet(2, Scripted())
    params = SamplingParams(max_tokens=30)
    prompt = tuple(range(3, 40))
    for name in ("before", "stays"):
        one.client.add(Request(request_id=name, prompt_token_ids=prompt, params=params))
        one.until(lambda name=name: name in one.finished)  # type: ignore[misc]
    one.client.add(Request(request_id="moves", prompt_token_ids=prompt, params=params))
    one.until(lambda: len(one.client.replicas.work["moves"].tokens) > 2)
    assert one.where("moves") == 0
    ask(one, (0, 1))
    one.until(lambda: one.where("moves") == 1)
    one.until(lambda: "moves" in one.finished)
    assert one.finished["moves"].num_cached_tokens == one.finished["stays"].num_cached_tokens > 0


def test_a_router_is_told_of_leaving_and_arriving_and_sees_who_was_moved(fleet: Callable[..., Fleet]) -> None:
    router = Scripted()
    one = fleet(2, router)
    one.client.add(request("a", num_tokens=4))
    ask(one, (0, 1))
    one.until(lambda: "a" in one.finished)
    moved, arrived = router.told[1:3], router.told[2][0]
    assert router.told[0] == ("selected", 0)
    assert moved == [("finished", 0), (arrived, 1)]
    assert arrived.startswith("moved after")
    assert router.told[3:] == [("finished", 1)]
    one.client.add(
        Request(
            request_id="b", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=9), priority=3, tenant="key/ann"
        )
    )
    one.clock.advance(1.0)
    one.until(lambda: len(router.shown) == 2)
    assert router.shown[1] == {
        "replica": [0],
        "num_prompt_tokens": [3],
        "num_output_tokens": router.shown[1]["num_output_tokens"],
        "num_moves": [0],
        "target": [-1],
        "priority": [3],
        "is_movable": [True],
        "tenants": ("key",),
    }


def test_requests_that_are_moved_all_the_time_have_the_same_texts_and_stay_after_the_limit(
    fleet: Callable[..., Fleet],
) -> None:
    def known(tokens: np.ndarray[Any, Any]) -> list[int]:
        return TEXT[len(tokens) - len(PROMPT) :]

    rng = random.Random(3)
    one = fleet(3, Scripted(), parts=lambda: {"speculator": ScriptedSpeculator(known)}, limits={"max_moves": 7})
    slots = [one.client.add(request(str(i))) for i in range(6)]
    while len(one.finished) < 6:
        ask(one, *[(rng.randrange(6), rng.randrange(3)) for _ in range(3)])
        one.turn()
    assert [one.tokens[slot] for slot in slots] == [TEXT] * 6
    assert max(max(shown["num_moves"]) for shown in one.mover._router.strategy.shown) <= 7  # type: ignore[union-attr]
    assert sum(row["num_rebalanced"] for row in rows(one)) > 6
    assert one.mover is not None
    assert one.mover.num_refused > 0


def test_one_whose_tokens_do_not_determine_the_rest_stays_where_it_is(fleet: Callable[..., Fleet]) -> None:
    router = Scripted()
    one = fleet(2, router, is_portable=lambda params: not params.mirostat_mode)
    slot = one.client.add(request("a", mirostat_mode=2))
    one.until(lambda: slot in one.tokens)
    ask(one, (0, 1))
    one.until(lambda: one.client.replicas.work["a"].stays)
    ask(one, (0, 1))
    one.until(lambda: "a" in one.finished)
    assert one.tokens[slot] == TEXT
    assert router.shown[1]["is_movable"] == [False]
    assert one.mover is not None
    assert one.mover.num_refused == 1
    assert not one.refused


def test_one_that_is_ended_on_its_way_ends_for_that_reason(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2, Scripted())
    slots = [one.client.add(request(name)) for name in "ab"]
    one.until(lambda: len(one.tokens) == 2)
    ask(one, (0, 1), (1, 0))
    one.client.receive()
    one.client.stop("a")
    one.client.abort("b")
    one.until(lambda: len(one.finished) == 2)
    assert [one.finished[name].finish_reason for name in "ab"] == [FinishReason.STOP, FinishReason.ABORT]
    assert [one.finished[name].token_ids.tolist() for name in "ab"] == [one.tokens[slot] for slot in slots]
    assert not one.client.has_work
    assert [row["num_rebalanced"] for row in rows(one)] == [0, 0]


def test_replicas_may_end_before_a_move_and_while_it_is_made(fleet: Callable[..., Fleet]) -> None:
    router = Scripted()
    one = fleet(3, router)
    slots = [one.client.add(request(name)) for name in "abc"]
    one.until(lambda: len(one.tokens) == 3)
    ask(one, (0, 1), (2, 1))  # a leaves 0 for 1, c leaves 2 for 1
    one.client.receive()
    one.kill(0)  # it has not said the end of a: as after any failure
    one.until(lambda: one.where("a") != 0 and one.where("c") == 1)
    assert [what for what, _ in router.told].count("selected") == 4, "a is routed anew"
    ask(one, (2, one.where("a")))
    one.client.receive()
    one.kill(1)
    one.until(lambda: len(one.finished) == 3)
    assert [one.tokens[slot] for slot in slots] == [TEXT] * 3
    assert sum(row["num_moved"] for row in rows(one)) >= 2


def test_a_router_that_fails_when_asked_for_moves_is_replaced_and_requests_go_on(fleet: Callable[..., Fleet]) -> None:
    for answer in (ValueError("no"), None, "01", [(0,)], [(0, "1")], [(True, 1)]):
        router = Scripted()
        one = fleet(2, router)
        one.client.add(request("a", num_tokens=4))
        router.asks = answer
        one.clock.advance(1.0)
        one.until(lambda one=one: "a" in one.finished)
        assert one.routing.generation == 1
        assert one.mover is not None
        assert not one.mover.is_due  # nothing moves any more


def test_texts_to_embed_do_not_move(fleet: Callable[..., Fleet]) -> None:
    router = Scripted()
    one = fleet(2, router)
    one.client.embed(EmbeddingRequest(request_id="t", token_ids=(1, 2)))
    one.clock.advance(1.0)
    one.until(lambda: bool(one.embedded))
    assert router.shown == []


def test_metrics_keep_moves_and_failures_apart(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2, Scripted())
    one.client.add(request("a"))
    ask(one, (0, 1), (0, 1), (7, 1))
    one.until(lambda: one.where("a") == 1)
    one.kill(1)
    one.until(lambda: one.where("a") == 0)
    pages: list[str] = []
    one.client.request_metrics(pages.append)
    one.until(lambda: bool(pages))
    for line in (
        'trencadis_replica_rebalanced_total{replica="0"} 1.0',
        'trencadis_replica_rebalanced_total{replica="1"} 0.0',
        'trencadis_replica_moved_total{replica="0"} 0.0',
        'trencadis_replica_moved_total{replica="1"} 1.0',
        "trencadis_refused_moves_total 2.0",
    ):
        assert line in pages[0]


# ----------------------------------------------------------------------------------------------- real models, seeds


PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9},
    {"temperature": 0.9},
    {"temperature": 0.8, "seed": 1, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
]


def test_a_model_that_samples_gives_the_same_tokens_with_moves_and_without(fleet: Callable[..., Fleet]) -> None:
    resolved, registry = load_with_plugins(
        environ={}, overrides={"model.path": "demo", "observer.names": (), "cache.num_blocks": 64}
    )

    def texts(count: int, moves: bool) -> list[list[int]]:
        one = fleet(count, Scripted(), parts=lambda: {"engine": build_engine(resolved.config, registry=registry)})
        prompts = [tuple(range(40 + 9 * i, 60 + 11 * i)) for i in range(len(PARAMS))]
        slots = [
            one.client.add(request(f"r{i}", prompt=prompts[i], num_tokens=12, ignore_eos=True, **more))
            for i, more in enumerate(PARAMS)
        ]
        while len(one.finished) < len(slots):
            live = list(one.client.replicas.work)
            if moves and len(one.tokens) == len(slots):
                ask(one, *[(i, 1 - one.where(name)) for i, name in enumerate(live)])
            one.turn()
        if moves:
            assert sum(row["num_rebalanced"] for row in rows(one)) >= 2 * len(slots)
        return [one.tokens[slot] for slot in slots]

    assert texts(2, moves=True) == texts(1, moves=False)


# ------------------------------------------------------------------------------------------------------ the mover


def mover_of(router: Any, count: int = 3, **limits: Any) -> tuple[Mover | None, Routing, SimulatedClock]:
    clock, guarded = SimulatedClock(), GuardedRouter("router", router)
    routing = Routing(guarded, num_replicas=count, clock=clock)
    config = Config(parallel=ParallelConfig(data=count), router=RouterConfig(**limits))
    return make_mover(config, guarded, routing, clock=clock), routing, clock


class Progressing:
    stalled = ""


def live_row(replica: int, *, num_moves: int = 0, target: int = -1, stays: bool = False) -> LiveRow:
    return LiveRow(request("a"), replica, 0, num_moves, target, stays)


def test_moves_that_cannot_be_made_are_refused_and_counted() -> None:
    router = Scripted()
    mover, routing, _ = mover_of(router)
    assert mover is not None
    for replica in range(2):
        routing.added(replica, Progressing())
    live = [live_row(0), live_row(0, stays=True), live_row(1, num_moves=4), live_row(1), live_row(1, target=2)]
    illegal = [
        Move(0, 0),  # it is there
        Move(0, 2),  # has not begun to serve
        Move(0, 3),  # is none
        Move(0, -1),
        Move(4, 0),  # is on its way
        Move(5, 1),  # no such request
        Move(-1, 1),
        Move(1, 1),  # stays
        Move(2, 0),  # was moved four times
    ]
    router.asks = [*illegal, Move(np.int32(0), np.int64(1)), Move(0, 1), (3, 0)]  # type: ignore[arg-type]
    assert mover.choose(live) == [Move(0, 1), Move(3, 0)]
    assert mover.num_refused == len(illegal) + 1  # and the second of the same request
    assert router.shown[0]["is_movable"] == [True, False, False, True, False]
    assert router.shown[0]["target"] == [-1, -1, -1, -1, 2]
    assert mover.choose([]) == []


def test_the_rate_of_moves_is_bounded_and_what_is_left_of_a_second_is_kept() -> None:
    router = Scripted()
    mover, routing, clock = mover_of(router, max_moves_per_s=2.0)  # six a second of three replicas
    assert mover is not None
    for replica in range(3):
        routing.added(replica, Progressing())
    live = [live_row(0) for _ in range(20)]

    def num_moves() -> int:
        router.asks = [Move(i, 1) for i in range(20)]
        assert mover is not None
        return len(mover.choose(live))

    assert [num_moves(), num_moves()] == [6, 0]
    clock.advance(0.5)
    assert num_moves() == 3
    clock.advance(100.0)
    assert num_moves() == 6
    assert mover.num_refused == 80 - 15


def test_a_router_is_asked_once_a_period() -> None:
    mover, _, clock = mover_of(Scripted())
    assert mover is not None
    dues = []
    for _ in range(4):
        clock.advance(0.5)
        dues.append(mover.is_due)
        if mover.is_due:
            mover.choose([])
    assert dues == [False, True, False, True]


def test_routers_and_limits_under_which_nothing_moves_have_no_mover() -> None:
    assert mover_of(LeastLive())[0] is None
    assert mover_of(Scripted(), max_moves=0)[0] is None
    assert mover_of(Scripted(), max_moves_per_s=0.0)[0] is None


@pytest.mark.parametrize("period_s", [0.0, -1.0, float("nan")])
def test_a_period_that_is_no_positive_number_is_refused(period_s: float) -> None:
    router = Scripted()
    router.moves_period_s = period_s
    with pytest.raises(ContractError, match="moves_period_s"):
        mover_of(router)


def test_loads_are_shown_and_a_target_that_has_ended_meanwhile_is_not_taken() -> None:
    router = Scripted()
    _, routing, _ = mover_of(router)
    for replica in range(2):
        routing.added(replica, Progressing())
    routing.loaded(1, EngineLoad(num_waiting=3, kv_usage=0.5))
    assert routing.views().num_waiting.tolist() == [0, 3, 0]
    facts = routing.facts(request("a"))
    assert routing.move(facts, 1)
    assert routing.views().num_live.tolist() == [0, 1, 0]
    routing.removed(1)
    assert not routing.move(facts, 1)
    assert not routing.move(facts, 2)
