"""Routers of docs/gallery/routing.md: E2 decides as its paper says, and following prefixes finds more of prompts than loads alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.gallery.routing.e2 import E2, trencadis_routers

from support.strategies.gallery_pages import page_of, results_of
from trencadis.api import load_with_plugins
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_testing.router import RouterConformance, replica_views, routing_request
from trencadis_tools.simulation import simulate
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import Workload, load_workload

FOLDER = Path(__file__).parents[2] / "examples" / "gallery" / "routing"
PROMPT = tuple(range(1, 42))
"""41 tokens, ten full blocks of four."""


def made(**options: float) -> tuple[E2, SimulatedClock]:
    clock = SimulatedClock()
    return E2(**options, context=ComponentContext(clock=clock, seed=0)), clock  # type: ignore[arg-type]


class TestE2(RouterConformance):
    def make(self) -> E2:
        return made()[0]


def test_most_of_a_prompt_in_a_cache_is_exploited_and_less_is_explored() -> None:
    router, _ = made()
    request = routing_request(PROMPT)
    for _ in range(3):
        assert router.select(request, replica_views([0, 0, 0], hit_blocks=[0, 6, 5])) == 1, "six of ten blocks"
    assert router.select(request, replica_views([0, 0, 0], hit_blocks=[0, 5, 0])) == 0, "a half is not most"


def test_exploring_takes_the_least_of_load_and_missing_tokens() -> None:
    router, _ = made()
    nothing = replica_views([0, 0])
    assert [router.select(routing_request(PROMPT), nothing) for _ in range(4)] == [0, 1, 0, 1]
    router.select(routing_request(PROMPT), nothing)
    half = [5, 0]  # 20.5 of 41 tokens are there, but 41 more are to be computed before
    assert router.select(routing_request(PROMPT), replica_views([0, 0], hit_blocks=half)) == 1


def test_of_replicas_with_the_longest_prefix_the_least_loaded_takes_it() -> None:
    router, _ = made()
    assert router.select(routing_request(PROMPT), replica_views([0, 0, 0])) == 0
    assert router.select(routing_request(PROMPT), replica_views([0, 0, 0], hit_blocks=[9, 9, 8])) == 1


def test_a_replica_that_is_loaded_beyond_the_ratio_gets_nothing_for_its_prefix() -> None:
    views = replica_views([0, 0], hit_blocks=[10, 0])
    for ratio, expected in ((2.0, 1), (3.0, 0)):
        router, _ = made(load_ratio=ratio)
        router.select(routing_request(tuple(range(100, 200))), replica_views([0, 0]))  # 100 > 2 (0 + 41)
        assert router.peek(routing_request(PROMPT), views) == expected


def test_load_is_forgotten_when_the_window_has_passed() -> None:
    router, clock = made(window_s=180.0)
    router.select(routing_request(PROMPT), replica_views([0, 0]))
    assert router.peek(routing_request(PROMPT), replica_views([0, 0])) == 1
    clock.advance(179.0)
    assert router.peek(routing_request(PROMPT), replica_views([0, 0])) == 1
    clock.advance(2.0)
    assert router.peek(routing_request(PROMPT), replica_views([0, 0])) == 0


def test_it_is_a_plugin_too_and_says_that_it_is_experimental() -> None:
    (component,) = trencadis_routers()
    assert (component.name, component.stability) == ("e2", "experimental")
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    assert isinstance(component.factory(component.config(load_ratio=2.0), context), E2)


@pytest.mark.parametrize("wrong", [{"window_s": 0.0}, {"load_ratio": 0.5}, {"answer_tokens": -1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    (component,) = trencadis_routers()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        component.config(**wrong)


def hit_ratio(router: str, workload: Workload) -> float:
    resolved, registry = load_with_plugins(
        file=FOLDER / f"{router}.toml", environ={}, overrides={"cache.block_size": 512, "cache.num_blocks": 800}
    )
    run = simulate(resolved.config, registry, workload, step_times=load_step_times("a100:llama_3_1_8b"), replicas=4)
    return run.num_prompt_tokens_cached / run.num_prompt_tokens_admitted


def test_following_documents_finds_more_of_prompts_than_loads_alone() -> None:
    """Nobody finds more than all but the first request for each document, whose part in whole blocks can be cached."""
    workload = load_workload(str(FOLDER / "documents.toml"), limit=60)
    num_documents = len({one.block_ids for one in workload.requests})
    cached_tokens = 21_400 // 512 * 512
    bound = (60 - num_documents) * cached_tokens / sum(one.num_prompt_tokens for one in workload.requests)
    assert 0 < hit_ratio("least_loaded", workload) < hit_ratio("e2", workload) <= bound


@pytest.mark.parametrize("workload", ["conversation", "synthetic", "documents"])
def test_the_page_shows_the_results_that_are_kept(workload: str) -> None:
    page = page_of("routing")
    kept = results_of(f"routing_{workload}")
    for point in kept["comparison"]["points"]:
        for outcome in point["outcomes"]:
            found, mean, p99 = (outcome["values"][name] for name in ("prefix_hit_ratio", "ttft_mean", "ttft_p99"))
            assert f"| `{outcome['name']}` | {100 * found:.1f} % | {mean:.2f} s | {p99:.1f} s |" in page
