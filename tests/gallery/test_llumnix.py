"""Llumnix of docs/gallery/llumnix.md decides as its paper and program say, and moves help where one replica is crowded."""

from __future__ import annotations

import numpy as np
import pytest
from examples.gallery.llumnix import measure
from examples.gallery.llumnix.llumnix import LeastUsed, Llumnix, trencadis_routers

from support.strategies.gallery_pages import page_of, results_of
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, Move
from trencadis_testing.router import RouterConformance, live_requests, replica_views, routing_request

TOKENS = 1600
"""KV of a replica in these tests: 100 blocks of 16."""


class TestLlumnix(RouterConformance):
    def make(self) -> Llumnix:
        return Llumnix()


@pytest.mark.nightly
class TestLlumnixThatMovesWhatWaits(RouterConformance):
    def make(self) -> Llumnix:
        return Llumnix(moves_waiting=True, headroom_tokens=500)


@pytest.mark.nightly
class TestLeastUsed(RouterConformance):
    make = LeastUsed


def test_requests_go_to_the_freest_replica_by_the_blocks_that_each_request_there_has_left() -> None:
    """1,200 tokens for two requests are less than 1,000 for one; an empty replica is freer than all."""
    views = {"num_live": [2, 1, 3], "kv_usage": [0.25, 0.375, 0.1]}
    assert Llumnix(TOKENS).select(routing_request(), replica_views(**views)) == 1  # type: ignore[arg-type]
    assert LeastUsed(TOKENS).select(routing_request(), replica_views(**views)) == 2  # type: ignore[arg-type]
    assert Llumnix(TOKENS).select(routing_request(), replica_views([1, 0], kv_usage=[0.0, 0.9])) == 1


def test_what_waits_counts_as_used() -> None:
    router = LeastUsed(TOKENS)
    long = routing_request(range(1000))
    assert router.select(long, replica_views([0, 0])) == 0
    assert router.select(long, replica_views([1, 2], num_waiting=[1, 0], kv_usage=[0.0, 0.5])) == 1, "1,000 wait at 0"
    router.on_finished(long, 0)
    assert router.peek(long, replica_views([1, 2], num_waiting=[1, 0], kv_usage=[0.0, 0.5])) == 0, "it has left"


def test_the_shortest_least_important_request_moves_off_a_replica_whose_queue_has_no_room() -> None:
    """Replica 0 has 160 tokens free and 1,000 asked for: (160 - 1000) / 4 requests is below minus three blocks."""
    live = live_requests(
        [0, 0, 0, 1, 0],
        num_prompt_tokens=[400, 300, 700, 100, 1000],
        num_output_tokens=[9, 9, 9, 5, 0],
        priority=[0, -1, 0, 0, 0],
    )
    views = replica_views([4, 1, 0], num_waiting=[1, 0, 0], kv_usage=[0.9, 0.1, 0.0])
    assert Llumnix(TOKENS).moves(live, views) == [Move(0, 2)], "300 is shorter and more important"
    assert Llumnix(TOKENS, moves_waiting=True).moves(live, views) == [Move(4, 2)]
    assert Llumnix(TOKENS, out_below=-20.0).moves(live, views) == []


def test_a_replica_that_has_preempted_gives_and_one_that_received_a_move_does_not() -> None:
    def moves(num_moves: int) -> list[Move]:
        live = live_requests(
            [0, 0, 1], num_prompt_tokens=[100, 100, 50], num_output_tokens=[9, 7, 1], num_moves=[0, num_moves, 0]
        )
        return list(Llumnix(TOKENS).moves(live, replica_views([2, 1], num_waiting=[1, 0], kv_usage=[0.5, 0.1])))

    assert moves(0) == [Move(0, 1)], "what waits has tokens: it lost its place"
    assert moves(1) == [], "it waits because it has just come"


def test_one_request_of_a_replica_moves_at_a_time_and_only_where_there_is_room() -> None:
    facts = {"num_prompt_tokens": [300, 300, 1500], "num_output_tokens": [5, 5, 0]}
    views = replica_views([3, 0], num_waiting=[1, 0], kv_usage=[0.9, 0.0])
    assert Llumnix(TOKENS).moves(live_requests([0] * 3, **facts), views) == [Move(0, 1)]  # type: ignore[arg-type]
    under_way = live_requests([0] * 3, target=[1, -1, -1], is_movable=[False, True, True], **facts)  # type: ignore[arg-type]
    assert Llumnix(TOKENS).moves(under_way, views) == []
    full = replica_views([3, 0], num_waiting=[1, 0], kv_usage=[0.9, 0.85])
    assert Llumnix(TOKENS).moves(live_requests([0] * 3, **facts), full) == []  # type: ignore[arg-type]


def test_headroom_makes_replicas_of_important_requests_give_others_away() -> None:
    live = live_requests([0, 0], num_output_tokens=[5, 5], priority=[-1, 0])
    views = replica_views([2, 0], kv_usage=[0.5, 0.0])
    assert Llumnix(TOKENS).moves(live, views) == []
    assert Llumnix(TOKENS, headroom_tokens=1000).moves(live, views) == [Move(1, 1)]


def test_it_is_a_plugin_too() -> None:
    (component,) = trencadis_routers()
    assert (component.name, component.stability) == ("llumnix", "experimental")
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    assert isinstance(component.factory(component.config(kv_tokens=5), context), Llumnix)


@pytest.mark.parametrize("config", ["llumnix_transfer", pytest.param("llumnix", marks=pytest.mark.nightly)])
def test_configurations_of_the_page_serve_their_workload_with_moves(config: str) -> None:
    row = measure.row_of(config, "sharegpt", rate=40.0, num_requests=60, num_replicas=2, seed=0)
    assert row["moves"] > 0
    assert 0 < row["ttft_p99"] < np.inf


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("llumnix")
    rows = results_of("llumnix")
    for row in rows:
        cells = (
            f"`{row['config']}`",
            f"{row['ttft_mean']:.2f} s",
            f"{row['ttft_p99']:.2f} s",
            f"{1000 * row['tpot_p99']:.0f} ms",
            f"{row['e2e_mean']:.1f} s",
            row["preemptions"],
            row["moves"],
        )
        assert f"| {' | '.join(map(str, cells))} |" in page, row
