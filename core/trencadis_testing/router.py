"""Conformance suite of the noun ``router``."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from trencadis.interfaces import LiveRequests, ReplicaViews, Router, RoutingRequest, SupportsMoves, legal
from trencadis_testing.hash_seeds import same_under_other_hashes
from trencadis_testing.resources import call_s, ends_its_threads, growth_bytes

__all__ = ["RouterConformance", "live_requests", "replica_views", "routing_request"]

_MAX_CALL_S = 50 * 200e-6
"""With 1,000 replicas: fifty times what the contract says, as clocks of shared machines are noisy."""

_MAX_MOVES_S = 20 * 10e-3
"""With 1,000 replicas and 20,000 requests: twenty times what the contract says."""

_MAX_GROWTH_BYTES = 16.0
"""For each request that ended: an entry of a list takes 8, one of a dictionary more than 60."""

_BLOCK = 4


def routing_request(
    token_ids: Sequence[int] = tuple(range(1, 42)), *, tenant: str = "", has_hashes: bool = True
) -> RoutingRequest:
    """Return a request for a prompt. Pure.

    Args:
        token_ids: Tokens of the prompt.
        tenant: Who asks.
        has_hashes: With hashes of its blocks of four tokens.
    """
    blocks = (len(token_ids) - 1) // _BLOCK if has_hashes else 0
    return RoutingRequest(
        token_ids=tuple(token_ids),
        block_hashes=tuple(_hash(token_ids[: _BLOCK * (i + 1)]) for i in range(blocks)),
        tenant=tenant.partition("/")[0],
        user=tenant,
    )


def _hash(token_ids: Sequence[int]) -> bytes:
    value = 0
    for token in token_ids:
        value = (value * 1_000_003 + token + 1) % 2**64
    return value.to_bytes(8, "little")


def replica_views(
    num_live: Sequence[int],
    *,
    num_waiting: Sequence[int] = (),
    kv_usage: Sequence[float] = (),
    hit_blocks: Sequence[int] = (),
    is_healthy: Sequence[bool] = (),
) -> ReplicaViews:
    """Return views of replicas with these loads. Pure.

    Args:
        num_live: Requests of each; those that do not wait run.
        num_waiting: Waiting sequences of each; none if empty.
        kv_usage: KV usage of each; 0 if empty.
        hit_blocks: Cached blocks of the prompt on each; 0 if empty.
        is_healthy: Health of each; all are healthy if empty.
    """
    count = len(num_live)
    live = np.array(num_live, np.int32)
    waiting = np.array(num_waiting or [0] * count, np.int32)
    return ReplicaViews(
        num_live=live,
        num_waiting=waiting,
        num_running=live - waiting,
        kv_usage=np.array(kv_usage or [0.0] * count, np.float64),
        hit_blocks=np.array(hit_blocks or [0] * count, np.int32),
        is_healthy=np.array(is_healthy or [True] * count, np.bool_),
    )


def live_requests(
    replica: Sequence[int],
    *,
    num_prompt_tokens: Sequence[int] = (),
    num_output_tokens: Sequence[int] = (),
    num_moves: Sequence[int] = (),
    target: Sequence[int] = (),
    priority: Sequence[int] = (),
    tenants: Sequence[str] = (),
    is_movable: Sequence[bool] = (),
) -> LiveRequests:
    """Return requests of these replicas. Pure.

    Args:
        replica: Replica of each.
        num_prompt_tokens: Prompt tokens of each; 10 if empty.
        num_output_tokens: Output tokens of each; 0 if empty, as are moves and priorities.
        num_moves: Moves of each so far.
        target: Target of each; -1 if empty.
        priority: Priority of each.
        tenants: Tenant of each; the unnamed one if empty.
        is_movable: Whether each can be moved; all can if empty.
    """
    count = len(replica)
    return LiveRequests(
        replica=np.array(replica, np.int32),
        num_prompt_tokens=np.array(num_prompt_tokens or [10] * count, np.int32),
        num_output_tokens=np.array(num_output_tokens or [0] * count, np.int32),
        num_moves=np.array(num_moves or [0] * count, np.int32),
        target=np.array(target or [-1] * count, np.int32),
        priority=np.array(priority or [0] * count, np.int64),
        tenants=tuple(tenants) or ("",) * count,
        is_movable=np.array(is_movable or [True] * count, np.bool_),
    )


class RouterConformance:
    """What every router must do; inherit from it, and set ``make``. Tests of moves pass those that support none.

    How well it chooses is its own affair: text never depends on it. Example::

        class TestRoundRobin(RouterConformance):
            make = RoundRobin
    """

    def make(self) -> Router:
        """Return a new router that has seen nothing."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourRouter, or a method make(self)")

    @pytest.mark.parametrize("seed", range(4))
    def test_answers_are_healthy_replicas(self, seed: int) -> None:
        """Whole numbers; there may be one replica, or one that is healthy among many, and any load."""
        rng, routers = random.Random(seed), {count: self.make() for count in (1, 2, 3, 9, 33)}
        for count in [*routers] * 24:
            router = routers[count]
            request, views = _some_request(rng), _some_views(rng, count)
            for method in (router.peek, router.select):
                legal(getattr(Router, method.__name__), method(request, views), request, views)

    def test_a_peek_tells_the_next_choice_and_changes_nothing(self) -> None:
        """Asking is free: who asks often, or not at all, gets the same choices."""
        asked, silent = self.make(), self.make()
        for number, (request, views) in enumerate(_calls(200, seed=5)):
            peeks = [asked.peek(request, views) for _ in range(number % 3)]
            chosen = asked.select(request, views)
            assert set(peeks) <= {chosen}, f"call {number}: peeks {peeks}, then {chosen} was selected"
            assert chosen == silent.select(request, views), f"call {number}: the choice depends on peeks"

    def test_views_and_requests_are_not_changed(self) -> None:
        """The arrays are the core's own."""
        router = self.make()
        for request, views in _calls(60, seed=7):
            arrays = [getattr(views, name) for name in _ARRAYS]
            before, asked = [array.copy() for array in arrays], repr(request)
            router.peek(request, views)
            router.on_finished(request, router.select(request, views))
            changed = [name for name, old, new in zip(_ARRAYS, before, arrays, strict=True) if (old != new).any()]
            assert not changed, f"arrays were changed: {changed}"
            assert repr(request) == asked, "the request was changed"

    def test_same_calls_give_the_same_answers(self) -> None:
        """Replay and simulation must agree: no wall clock, no global random source."""
        assert self._answers() == self._answers()

    def test_same_answers_in_a_process_that_hashes_differently(self) -> None:
        """No order of a set of names or hashes."""
        same_under_other_hashes(self, "_answers")

    def _answers(self) -> list[int]:
        router, answers = self.make(), []
        for number, (request, views) in enumerate(_calls(150, seed=11)):
            answers.append(int(router.select(request, views)))
            if number % 4:
                router.on_finished(request, answers[-1])
        return answers

    def test_replicas_and_requests_come_and_go_in_any_order(self) -> None:
        """One may end and begin again, with its requests or without, before the first request and after the last."""
        router, rng = self.make(), random.Random(13)
        live: list[tuple[RoutingRequest, int]] = []
        up = [False] * 6
        for _ in range(400):
            replica = rng.randrange(6)
            if rng.random() < 0.3 or not any(up):
                up[replica] = not up[replica]
                (router.on_replica_added if up[replica] else router.on_replica_removed)(replica)
                for request, chosen in [one for one in live if one[1] == replica and not up[replica]]:
                    router.on_finished(request, chosen)
                live = [one for one in live if up[one[1]]]
                continue
            request = _some_request(rng)
            views = _some_views(rng, 6, is_healthy=up)
            chosen = router.select(request, views)
            assert views.is_healthy[chosen], f"{chosen} is down"
            live.append((request, chosen))
            if len(live) > 8:
                router.on_finished(*live.pop(rng.randrange(len(live))))

    def test_no_healthy_replica_is_left_without_requests(self) -> None:
        """Each healthy replica gets some of the requests that have nothing in common, and who is not healthy gets none."""
        router, count = self.make(), 5
        num_live = [0] * count
        healthy = [True, True, False, True, True]
        for number in range(200):
            request = routing_request([number * 97 + i for i in range(9)])
            num_live[router.select(request, replica_views(num_live, is_healthy=healthy))] += 1
        assert not num_live[2], "a replica that is not healthy got requests"
        assert all(num_live[i] for i in (0, 1, 3, 4)), f"requests by replica: {num_live}"

    def test_a_choice_among_a_thousand_replicas_takes_microseconds(self) -> None:
        """Each request waits for it."""
        router, rng = self.make(), random.Random(17)
        requests = [_some_request(rng) for _ in range(8)]
        views = _some_views(rng, 1000)
        for request in requests:
            router.on_finished(request, router.select(request, views))
        took_s = min(call_s(lambda request=request: router.select(request, views)) for request in requests)  # type: ignore[misc]
        assert took_s < _MAX_CALL_S, f"select() takes {took_s * 1e6:.0f} µs with 1,000 replicas"

    def test_nothing_is_kept_of_requests_that_ended(self) -> None:
        """Prompts that come again and again, each request a new one."""
        router, rng = self.make(), random.Random(19)
        prompts = [[rng.randrange(1000) for _ in range(20)] for _ in range(16)]
        views = replica_views([3, 1, 2])

        def operate(number: int) -> None:
            request = routing_request(prompts[number % 16], tenant=f"key/{number}")
            router.on_finished(request, router.select(request, views))

        grown = growth_bytes(operate)
        assert grown < _MAX_GROWTH_BYTES, f"memory grows by {grown:.0f} bytes with each request"

    def test_moves_are_legal_and_come_as_moves(self) -> None:
        """Movable requests, each once, to healthy replicas that do not have them; the period is a positive time."""
        for router, live, views in self._asked_for_moves(120, seed=29):
            assert 0 < router.moves_period_s < np.inf, f"moves_period_s = {router.moves_period_s!r}"
            moves = router.moves(live, views)
            legal(SupportsMoves.moves, moves, live, views)
            assert len({move[0] for move in moves}) == len(moves), f"a request moves twice: {moves}"
            for request, replica in moves:
                assert 0 <= request < len(live.replica), f"there is no request {request}"
                assert live.is_movable[request], f"request {request} may not move"
                assert 0 <= replica < len(views.is_healthy), f"there is no replica {replica}"
                assert views.is_healthy[replica], f"replica {replica} is not healthy"
                assert live.replica[request] != replica, f"request {request} is at {replica} already"

    def test_to_ask_for_moves_changes_nothing(self) -> None:
        """The same question has the same answer, choices do not depend on it, and views stay as they are."""
        silent = self.make()
        for router, live, views in self._asked_for_moves(60, seed=31):
            columns = [getattr(live, name) for name in _COLUMNS] + [getattr(views, name) for name in _ARRAYS]
            before = [array.copy() for array in columns]
            first, second = list(router.moves(live, views)), list(router.moves(live, views))
            assert first == second, f"{first}, and then {second}"
            assert all((old == new).all() for old, new in zip(before, columns, strict=True)), "arrays were changed"
            request = routing_request()
            assert router.select(request, views) == silent.select(request, views), "the choice depends on moves()"

    def test_a_move_is_followed_by_the_end_of_the_request_like_a_choice(self) -> None:
        """A request may move any number of times before it ends, and nothing is kept of it."""
        router, views = self.make(), replica_views([3, 1, 2])
        if not isinstance(router, SupportsMoves):
            return
        prompts = [list(range(i, i + 20)) for i in range(16)]

        def operate(number: int) -> None:
            request = routing_request(prompts[number % 16], tenant=f"key/{number}")
            replica = router.select(request, views)
            for _ in range(2):
                router.on_finished(request, replica)
                replica = (replica + 1) % 3
                router.on_moved(request, replica)
            router.on_finished(request, replica)

        grown = growth_bytes(operate)
        assert grown < _MAX_GROWTH_BYTES, f"memory grows by {grown:.0f} bytes with each request"

    def test_moves_of_thousands_of_requests_take_milliseconds(self) -> None:
        """All streams of a server wait for it."""
        router, rng = self.make(), random.Random(37)
        if not isinstance(router, SupportsMoves):
            return
        live, views = _some_live(rng, 20_000, 1000), _some_views(rng, 1000)
        router.moves(live, views)
        took_s = call_s(lambda: router.moves(live, views), num_calls=1, num_tries=3)
        assert took_s < _MAX_MOVES_S, f"moves() takes {took_s * 1e3:.0f} ms with 20,000 requests"

    def _asked_for_moves(self, number: int, *, seed: int) -> Iterator[tuple[Any, LiveRequests, ReplicaViews]]:
        """Yield a router that supports moves, and what it may be shown; nothing for others."""
        router, rng = self.make(), random.Random(seed)
        if isinstance(router, SupportsMoves):
            for _ in range(number):
                yield router, _some_live(rng, rng.choice((1, 2, 9, 40)), 7), _some_views(rng, 7)

    def test_no_thread_is_left(self) -> None:
        """A router has no ``close``, so it may not start what would have to be ended."""
        with ends_its_threads("the router"):
            router = self.make()
            for request, views in _calls(5, seed=23):
                router.select(request, views)


_COLUMNS = ("replica", "num_prompt_tokens", "num_output_tokens", "num_moves", "target", "priority", "is_movable")
_ARRAYS = ("num_live", "num_waiting", "num_running", "kv_usage", "hit_blocks", "is_healthy")


def _some_request(rng: random.Random) -> RoutingRequest:
    """Return a request whose prompt begins as that of others."""
    begin = [rng.randrange(3)] * rng.choice((0, 4, 16))
    tokens = begin + [rng.randrange(50) for _ in range(rng.choice((1, 3, 20, 80)))]
    return routing_request(
        tokens,
        tenant=rng.choice(("", "a", "a/b")),
        has_hashes=rng.random() < 0.8,
    )


def _some_views(rng: random.Random, count: int, *, is_healthy: Sequence[bool] = ()) -> ReplicaViews:
    healthy = list(is_healthy) or [rng.random() < 0.6 for _ in range(count)]
    if not any(healthy):
        healthy[rng.randrange(count)] = True
    busy = rng.choice((1, 40, 10_000))
    num_live = [rng.randrange(busy) for _ in range(count)]
    return replica_views(
        num_live,
        num_waiting=[rng.randrange(one + 1) for one in num_live],
        kv_usage=[rng.choice((0.0, rng.random(), 1.0)) for _ in range(count)],
        hit_blocks=[rng.choice((0, 0, rng.randrange(6))) for _ in range(count)],
        is_healthy=healthy,
    )


def _some_live(rng: random.Random, count: int, num_replicas: int) -> LiveRequests:
    """Return requests that crowd on some replicas."""
    crowd = rng.choice((1, 2, num_replicas))
    target = [rng.choice((-1, -1, -1, rng.randrange(num_replicas))) for _ in range(count)]
    return live_requests(
        [rng.randrange(crowd) for _ in range(count)],
        target=target,
        num_prompt_tokens=[rng.choice((1, 30, 3000)) for _ in range(count)],
        num_output_tokens=[rng.choice((0, 0, 1, 400)) for _ in range(count)],
        num_moves=[rng.randrange(3) for _ in range(count)],
        priority=[rng.choice((-1, 0, 0, 5)) for _ in range(count)],
        tenants=[rng.choice(("", "a")) for _ in range(count)],
        is_movable=[one < 0 and rng.random() < 0.8 for one in target],
    )


def _calls(number: int, *, seed: int) -> list[tuple[RoutingRequest, Any]]:
    rng = random.Random(seed)
    return [(_some_request(rng), _some_views(rng, 7)) for _ in range(number)]
