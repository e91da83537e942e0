from __future__ import annotations

import random

import pytest

from trencadis_remote.router.cache_aware import CacheAware
from trencadis_remote.router.config import CacheAwareConfig
from trencadis_remote.router.radix_tree import RadixTree
from trencadis_testing import RouterConformance
from trencadis_testing.router import replica_views, routing_request

PROMPT = tuple(range(1, 21))
REQUEST = routing_request(PROMPT)
IDLE = replica_views([0, 0])


class TestCacheAware(RouterConformance):
    make = CacheAware


def sent_to_0(**options: float) -> CacheAware:
    """Return a router that has sent a prompt to replica 0 of two."""
    router = CacheAware(CacheAwareConfig(**options))  # type: ignore[arg-type]
    assert router.select(REQUEST, IDLE) == 0
    return router


@pytest.mark.parametrize(("loads", "expected"), [((40, 5), 1), ((30, 5), 0)])
def test_the_vectors_of_the_rule(loads: tuple[int, int], expected: int) -> None:
    """Thresholds 32 and 1.5: 35 > 32 and 40 > 7.5, so the least loaded; 25 <= 32, so the prefix decides."""
    router = sent_to_0(balance_abs_threshold=32, balance_rel_threshold=1.5)
    assert router.peek(REQUEST, replica_views(loads)) == expected


def test_the_constants_are_sglangs() -> None:
    config = CacheAwareConfig()
    assert (config.cache_threshold, config.balance_abs_threshold, config.balance_rel_threshold) == (0.5, 32, 1.1)


@pytest.mark.parametrize(("num_equal", "expected"), [(20, 0), (11, 0), (10, 1), (0, 1)])
def test_more_than_the_threshold_of_the_prompt_has_to_match(num_equal: int, expected: int) -> None:
    prompt = [*PROMPT[:num_equal], *range(100, 120 - num_equal)]
    assert sent_to_0().peek(routing_request(prompt), replica_views([1, 0])) == expected


def test_both_thresholds_have_to_be_exceeded() -> None:
    router = sent_to_0()
    assert router.peek(REQUEST, replica_views([400, 367])) == 0  # by 33, and by less than a tenth
    assert router.peek(REQUEST, replica_views([32, 0])) == 0  # by 32


def test_a_decision_for_the_least_loaded_is_put_into_the_tree_too() -> None:
    router = sent_to_0()
    assert router.select(REQUEST, replica_views([40, 5])) == 1
    assert router.peek(REQUEST, IDLE) == 1  # the last that got it


def test_the_first_healthy_one_stands_in_for_a_replica_that_is_not() -> None:
    router = CacheAware()
    assert router.select(REQUEST, replica_views([1, 1, 0])) == 2
    assert router.peek(REQUEST, replica_views([9, 0, 0], is_healthy=[True, True, False])) == 0


def test_a_replica_that_ended_has_no_prompts() -> None:
    router = sent_to_0()
    router.on_replica_removed(0)
    assert router.peek(REQUEST, replica_views([1, 0])) == 1


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
