"""Formulas of docs/gallery/two_choices.md hold where others are known, and two choices are better than one."""

from __future__ import annotations

import math

import pytest
from examples.gallery.two_choices import measure
from examples.gallery.two_choices.random_choice import RandomChoice

from support.strategies.gallery_pages import page_of, results_of
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_testing.router import RouterConformance, replica_views, routing_request
from trencadis_tools.compare.statistics import block_interval

LOADS = (0.3, 0.5, 0.8, 0.95)


class TestRandomChoice(RouterConformance):
    def make(self) -> RandomChoice:
        return RandomChoice(ComponentContext(clock=SimulatedClock(), seed=0))


def test_draws_follow_the_seed_and_reach_every_healthy_replica() -> None:
    def drawn(seed: int) -> list[int]:
        router = RandomChoice(ComponentContext(clock=SimulatedClock(), seed=seed))
        views = replica_views([0] * 4, is_healthy=[True, False, True, True])
        return [router.select(routing_request(), views) for _ in range(60)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert set(drawn(1)) == {0, 2, 3}


@pytest.mark.parametrize("load", LOADS)
def test_with_one_replica_every_formula_is_that_of_one_queue(load: float) -> None:
    assert measure.turns(load, 1) == pytest.approx(1 / (1 - load))
    assert measure.one_queue(load, 1) == pytest.approx(1 / (1 - load))


@pytest.mark.parametrize("load", LOADS)
def test_one_queue_for_all_is_erlangs_c(load: float) -> None:
    servers, offered = 5, 5 * load
    last = offered**servers / math.factorial(servers) / (1 - load)
    waits = last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)
    assert measure.one_queue(load, servers) == pytest.approx(1 + waits / (servers * (1 - load)))


@pytest.mark.parametrize("load", LOADS)
def test_two_choices_are_the_fixed_point_of_their_differential_equations(load: float) -> None:
    """The share of queues of at least i requests, s(i): what comes into them, λ (s(i-1)² − s(i)²), is what leaves, s(i) − s(i+1)."""
    shares = [load ** (2.0**i - 1) for i in range(40)]
    for before, at, after in zip(shares, shares[1:], shares[2:], strict=False):
        assert load * (before**2 - at**2) == pytest.approx(at - after, abs=1e-12)
    assert measure.two_choices(load) == pytest.approx(sum(shares[1:]) / load), "by Little's law"


def test_turns_are_better_than_two_choices_under_little_load_and_worse_under_much() -> None:
    for load in LOADS:
        expected = measure.formulas(load, 50)
        best, *between, worst = (expected[name] for name in ("least_loaded", "round_robin", "power_of_two", "random"))
        assert best < min(between)
        assert max(between) < worst
        assert (expected["round_robin"] < expected["power_of_two"]) is (load < 0.5)


@pytest.mark.parametrize("num_requests", [300, pytest.param(1000, marks=pytest.mark.nightly)])
def test_two_choices_are_better_than_one_request_by_request(num_requests: int) -> None:
    one, two = (
        measure.times(router, "poisson", num_replicas=4, seed=1, rate=4 * 0.8, limit=num_requests)
        for router in ("random", "power_of_two")
    )
    assert sum(two) < sum(one)
    if num_requests == 1000:
        assert block_interval(one, two).high < 0


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("two_choices")
    kept = results_of("two_choices")
    for row in kept["steady"]:
        assert (
            f"| {row['load']} | `{row['router']}` | {row['formula']:.2f} | {row['mean']:.2f} | {row['p99']:.2f} |"
            in page
        )
        assert row["formula"] == pytest.approx(
            measure.formulas(row["load"], measure.NUM_REPLICAS)[row["router"]], abs=1e-4
        )
    for row in kept["bursts"]:
        assert f"| `{row['router']}` | {row['mean']:.2f} | {row['p99']:.2f} |" in page
