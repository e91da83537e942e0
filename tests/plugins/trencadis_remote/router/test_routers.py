from __future__ import annotations

import random

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_remote.router import trencadis_routers
from trencadis_remote.router.cache_aware import CacheAware
from trencadis_remote.router.config import CacheAwareConfig, PrefixAffinityConfig
from trencadis_remote.router.least_loaded import LeastLoaded
from trencadis_remote.router.loads import loads
from trencadis_remote.router.power_of_two import PowerOfTwo
from trencadis_remote.router.prefix_affinity import PrefixAffinity
from trencadis_remote.router.radix_tree import RadixTree
from trencadis_remote.router.round_robin import RoundRobin
from trencadis_testing import RouterConformance
from trencadis_testing.router import replica_views, routing_request

REQUEST = routing_request()


class TestRoundRobin(RouterConformance):
    make = RoundRobin


class TestLeastLoaded(RouterConformance):
    make = LeastLoaded


class TestPowerOfTwo(RouterConformance):
    make = PowerOfTwo


def test_turns_leave_out_who_is_not_healthy() -> None:
    router, views = RoundRobin(), replica_views([9, 0, 5, 0], is_healthy=[True, False, True, True])
    assert [router.select(REQUEST, views) for _ in range(5)] == [0, 2, 3, 0, 2]


@pytest.mark.parametrize(
    ("num_live", "num_waiting", "kv_usage", "expected"),
    [
        (10, 0, 1.0, 10.0),
        (10, 4, 0.5, 10.0),
        (10, 4, 0.75, 10 + 6 * 4 * 0.25),
        (10, 4, 1.0, 10 + 6 * 4 * 0.5),
    ],
)
def test_a_load_is_vllms_score(num_live: int, num_waiting: int, kv_usage: float, expected: float) -> None:
    views = replica_views([num_live], num_waiting=[num_waiting], kv_usage=[kv_usage])
    assert loads(views).tolist() == [expected]


def test_what_a_replica_says_counts_where_it_has_more_than_was_sent_from_here() -> None:
    views = replica_views([7, 5])
    views.num_live[:] = [0, 5]
    assert LeastLoaded().peek(REQUEST, views) == 1


def test_equals_take_turns() -> None:
    router, views = LeastLoaded(), replica_views([2, 1, 1, 1])
    assert [router.select(REQUEST, views) for _ in range(4)] == [1, 2, 3, 1]


def test_the_less_loaded_of_two_is_taken_as_often_as_arithmetic_says() -> None:
    # Of 4 replicas with loads 0, 1, 2, 3 and 6 pairs: 0 wins 3, 1 wins 2, 2 wins 1, 3 none.
    router, views = PowerOfTwo(seed=3), replica_views([0, 1, 2, 3])
    num_draws = 3000
    counts = np.bincount([router.select(REQUEST, views) for _ in range(num_draws)], minlength=4)
    expected = num_draws * np.array([3, 2, 1, 0]) / 6
    # Chi-square with 2 degrees of freedom exceeds 13.8 once in 1,000 seeds; this one is fixed.
    assert ((counts - expected)[:3] ** 2 / expected[:3]).sum() < 13.8
    assert counts[3] == 0


class TestPrefixAffinity(RouterConformance):
    make = PrefixAffinity


def test_the_replica_with_most_of_the_prompt_takes_it() -> None:
    router = PrefixAffinity()
    assert router.peek(REQUEST, replica_views([2, 2, 2], hit_blocks=[3, 9, 0])) == 1
    assert router.peek(REQUEST, replica_views([2, 2, 2], hit_blocks=[3, 9, 0], is_healthy=[True, False, True])) == 0


@pytest.mark.parametrize(
    ("num_live", "hit_blocks", "expected"),
    [
        ([4, 2], [10, 0], 0),  # costs 4/3 - 2 and 2/3
        ([4, 2], [2, 0], 1),  # costs 4/3 - 2/5 and 2/3
        ([1, 0], [1, 0], 1),  # mean taken as 1: costs 1 - 1/5 and 0
        ([1, 0], [10, 0], 0),
    ],
)
def test_load_counts_against_the_share_of_the_prompt(num_live: list[int], hit_blocks: list[int], expected: int) -> None:
    assert PrefixAffinity().peek(REQUEST, replica_views(num_live, hit_blocks=hit_blocks)) == expected


@pytest.mark.parametrize(("loads", "expected"), [((40, 5), 1), ((30, 5), 0), ((120, 85), 0)])
def test_prefixes_do_not_count_while_loads_are_imbalanced(loads: tuple[int, int], expected: int) -> None:
    # (120, 85) differ by 35 > 32, and by less than half; (30, 5) by 25.
    router = PrefixAffinity(PrefixAffinityConfig(prefix_weight=100.0))
    assert router.peek(REQUEST, replica_views(loads, hit_blocks=[10, 0])) == expected


def test_without_hashes_it_is_the_least_loaded_one() -> None:
    request = routing_request(has_hashes=False)
    router = PrefixAffinity()
    assert [router.select(request, replica_views([1, 0, 0])) for _ in range(3)] == [1, 2, 1]


def test_replicas_with_equal_costs_take_turns() -> None:
    router = PrefixAffinity()
    assert [router.select(REQUEST, replica_views([0, 0, 0])) for _ in range(4)] == [0, 1, 2, 0]


PROMPT = tuple(range(1, 21))


ASKED = routing_request(PROMPT)


IDLE = replica_views([0, 0])


class TestCacheAware(RouterConformance):
    make = CacheAware


def sent_to_0(**options: float) -> CacheAware:
    """Return a router that has sent a prompt to replica 0 of two."""
    router = CacheAware(CacheAwareConfig(**options))  # type: ignore[arg-type]
    assert router.select(ASKED, IDLE) == 0
    return router


@pytest.mark.parametrize(("loads", "expected"), [((40, 5), 1), ((30, 5), 0)])
def test_the_vectors_of_the_rule(loads: tuple[int, int], expected: int) -> None:
    """Thresholds 32 and 1.5: 35 > 32 and 40 > 7.5, so the least loaded; 25 <= 32, so the prefix decides."""
    router = sent_to_0(balance_abs_threshold=32, balance_rel_threshold=1.5)
    assert router.peek(ASKED, replica_views(loads)) == expected


@pytest.mark.parametrize(("num_equal", "expected"), [(20, 0), (11, 0), (10, 1), (0, 1)])
def test_more_than_the_threshold_of_the_prompt_has_to_match(num_equal: int, expected: int) -> None:
    prompt = [*PROMPT[:num_equal], *range(100, 120 - num_equal)]
    assert sent_to_0().peek(routing_request(prompt), replica_views([1, 0])) == expected


def test_both_thresholds_have_to_be_exceeded() -> None:
    router = sent_to_0()
    assert router.peek(ASKED, replica_views([400, 367])) == 0  # by 33, and by less than a tenth
    assert router.peek(ASKED, replica_views([32, 0])) == 0  # by 32


def test_a_decision_for_the_least_loaded_is_put_into_the_tree_too() -> None:
    router = sent_to_0()
    assert router.select(ASKED, replica_views([40, 5])) == 1
    assert router.peek(ASKED, IDLE) == 1  # the last that got it


def test_the_first_healthy_one_stands_in_for_a_replica_that_is_not() -> None:
    router = CacheAware()
    assert router.select(ASKED, replica_views([1, 1, 0])) == 2
    assert router.peek(ASKED, replica_views([9, 0, 0], is_healthy=[True, True, False])) == 0


def test_a_replica_that_ended_has_no_prompts() -> None:
    router = sent_to_0()
    router.on_replica_removed(0)
    assert router.peek(ASKED, replica_views([1, 0])) == 1


def longest(sent: list[tuple[tuple[int, ...], int]], prompt: tuple[int, ...]) -> int:
    return max(
        (
            next((i for i, (a, b) in enumerate(zip(p, prompt, strict=False)) if a != b), min(len(p), len(prompt)))
            for p, _ in sent
        ),
        default=0,
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_match_is_the_longest_common_beginning(seed: int) -> None:
    rng, tree = random.Random(seed), RadixTree(10**6)
    sent: list[tuple[tuple[int, ...], int]] = []
    for _ in range(150):
        prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
        length, replica = tree.match(prompt)
        assert length == longest(sent, prompt)
        if length:
            assert replica == [who for text, who in sent if text[:length] == prompt[:length]][-1]
        sent.append((prompt, rng.randrange(3)))
        tree.insert(*sent[-1])
    for replica in range(3):
        distinct = {text[: i + 1] for text, who in sent if who == replica for i in range(len(text))}
        assert tree.num_tokens(replica) == len(distinct)
        tree.remove(replica)
        assert tree.num_tokens(replica) == 0
        sent = [one for one in sent if one[1] != replica]
        assert tree.match(prompt)[0] == longest(sent, prompt)


@pytest.mark.parametrize("seed", range(2))
def test_a_tree_is_bounded_and_the_least_recently_used_goes_first(seed: int) -> None:
    rng, tree = random.Random(seed), RadixTree(40)
    prompts = [tuple([number] * 8) for number in range(20)]
    for _ in range(300):
        tree.insert(tuple(rng.randrange(2) for _ in range(rng.randrange(1, 60))), rng.randrange(2))
        assert max(tree.num_tokens(0), tree.num_tokens(1)) <= 40
    for prompt in prompts:
        tree.insert(prompt, 0)
        tree.insert(prompts[0], 0)  # used again and again
    assert [tree.match(prompt)[0] == 8 for prompt in prompts] == [True, *[False] * 15, *[True] * 4]


COMPONENTS = {component.name: component for component in trencadis_routers()}


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "power_of_two", "prefix_affinity", "cache_aware"])
def test_a_factory_makes_a_router_named_as_the_component(name: str) -> None:
    component = COMPONENTS[name]
    made = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=3))
    assert type(made).__name__ == name.title().replace("_", "")
