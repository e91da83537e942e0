from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from trencadis.errors import StepFailedError
from trencadis.interfaces import EvictionPolicy
from trencadis_gallery.config import TwoQueueConfig
from trencadis_gallery.eviction.arc import Arc
from trencadis_gallery.eviction.s3_fifo import S3Fifo
from trencadis_gallery.eviction.slru import Slru
from trencadis_gallery.eviction.two_queue import TwoQueue
from trencadis_plugins.eviction.config import LfuConfig
from trencadis_plugins.eviction.cost_aware import CostAware
from trencadis_plugins.eviction.lfu import Lfu
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.engines import OldestFirst
from trencadis_tools.bench.block_trace import BlockRequest, parse_block_trace
from trencadis_tools.bench.eviction import EvictionResult, best_hit_ratio, measure_eviction

TRACES = Path(__file__).parents[5] / "shared" / "data" / "traces"
CONVERSATION = "mooncake_fast25_conversation_first30min.jsonl"
SYNTHETIC = "mooncake_fast25_synthetic.jsonl"
CAPACITIES = (1000, 10_000)


def requests(*chains: Sequence[int]) -> list[BlockRequest]:
    return [BlockRequest(float(now_s), tuple(chain)) for now_s, chain in enumerate(chains)]


def run(*chains: Sequence[int], capacity: int = 4, **options: object) -> EvictionResult:
    return measure_eviction("lru", Lru, requests(*chains), capacity=capacity, **options)


def test_only_the_chain_from_the_head_hits() -> None:
    result = run([0, 1, 2], [0, 1, 5], [7], [0, 1, 2], capacity=9)
    assert (result.num_hits, result.num_references, result.hit_ratio) == (2 + 3, 10, 0.5)
    assert result.num_evictions == 0


def test_oldest_tail_is_evicted_when_the_next_request_does_not_fit() -> None:
    result = run([0, 1, 2], [5, 6], [0, 1, 2])
    assert (result.num_hits, result.num_evictions, result.num_unused) == (2, 1 + 1, 1 + 1)


def test_head_first_order_leaves_successors_that_nobody_can_find() -> None:
    result = run([0, 1, 2], [5, 6], [0, 1, 2], tail_first=False)
    assert (result.num_hits, result.num_orphaning) == (0, 1 + 1)


def test_chain_order_evicts_successors_along() -> None:
    result = run([0, 1, 2], [5, 6], [8, 9], tail_first=False, chain_order=True)
    assert (result.num_evictions, result.num_orphaning) == (3, 1)
    assert run([0, 1, 2], [5, 6], [8, 9], tail_first=False).num_evictions == 3
    result = run([0, 1, 2], [5, 6], [7], tail_first=False, chain_order=True)
    assert result.num_evictions == 3, "0 takes 1 and 2 along, so that 7 finds room"


def test_requests_before_the_start_fill_the_cache_and_are_not_counted() -> None:
    result = run([0, 1], [2, 3], [4], [2, 3], capacity=4, from_s=2.0)
    assert (result.num_hits, result.num_references, result.num_evictions) == (2, 3, 1)
    result = run([0, 1, 2], [5, 6], [5, 6], from_s=2.0)
    assert (result.num_hits, result.num_references, result.num_evictions) == (2, 2, 0)


def test_best_ratio_is_that_of_a_cache_without_end() -> None:
    trace = requests([0, 1], [0, 2], [0, 1, 3])
    assert best_hit_ratio(trace) == 3 / 7
    assert best_hit_ratio(trace, from_s=2.0) == 2 / 3
    assert best_hit_ratio([]) == 0.0
    assert measure_eviction("lru", Lru, trace, capacity=100).hit_ratio == 3 / 7


def test_policy_that_evicts_what_is_no_candidate_is_named() -> None:
    class Wrong(OldestFirst):
        def victims(self, num_blocks: int) -> list[int]:
            return [99] * num_blocks

    with pytest.raises(StepFailedError, match="eviction policy wrong raised ContractError: victims"):
        measure_eviction("wrong", Wrong, requests([0, 1, 2]), capacity=2)


# ------------------------------------------------------------------------------------------------ the public trace


@functools.cache
def public_trace(name: str = CONVERSATION) -> tuple[BlockRequest, ...]:
    file = TRACES / name
    if not file.exists():
        pytest.skip(f"{file} is not there: the shared data folder is not part of the repository")
    return parse_block_trace(file.read_text(), name)


def forever() -> Lfu:
    return Lfu(LfuConfig(half_life_s=0.0, history=1e9))


def without_memory() -> Lfu:
    return Lfu(LfuConfig(half_life_s=0.0, history=0.0))


def fifo() -> TwoQueue:
    return TwoQueue(TwoQueueConfig(new_ratio=1.0, history=0.0))


PUBLISHED: list[tuple[str, Callable[[], EvictionPolicy], bool, tuple[float, ...], float]] = [
    ("FIFO", fifo, True, (0.0424, 0.1816), 0.1857),
    ("LRU", Lru, False, (0.0432, 0.2054), 0.1878),
    ("LRU-tail", Lru, True, (0.0433, 0.2056), 0.1906),
    ("SLRU", Slru, True, (0.0483, 0.1680), 0.1749),
    ("LFU", without_memory, False, (0.0483, 0.1675), 0.1286),
    ("LFU-perf", forever, False, (0.0801, 0.2034), 0.1763),
    ("2Q", TwoQueue, True, (0.0533, 0.1802), 0.1847),
    ("S3-FIFO", S3Fifo, True, (0.0571, 0.1928), 0.1914),
]
"""Hit ratios of independent implementations: of the conversation trace with each capacity, and of the synthetic one with 3,000
blocks. LRU and both LFU touch the blocks of a request from the head on, the others from the tail."""


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("trace", [SYNTHETIC, pytest.param(CONVERSATION, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("policy", PUBLISHED, ids=[r[0] for r in PUBLISHED])
def test_hit_ratios_equal_the_published_ones(policy: Any, trace: str) -> None:
    name, make, tail_first, ratios, synthetic = policy
    expected = {3000: synthetic} if trace == SYNTHETIC else dict(zip(CAPACITIES, ratios, strict=True))
    for capacity, ratio in expected.items():
        result = measure_eviction(name, make, public_trace(trace), capacity=capacity, tail_first=tail_first)
        assert round(result.hit_ratio, 4) == ratio


def test_the_trace_cannot_give_more_hits_than_published() -> None:
    assert round(best_hit_ratio(public_trace()), 4) == 0.3409
    assert sum(len(request.contents) for request in public_trace()) == 146_464


@pytest.mark.nightly  # that the policies are as good as published: above
@pytest.mark.parametrize("capacity", [3000, 10_000])
def test_policies_beat_lru_after_the_minutes_their_defaults_were_chosen_on(capacity: int) -> None:
    lru, lfu, cost_aware, arc = (
        measure_eviction("p", policy, public_trace(), capacity=capacity, from_s=900.0).hit_ratio
        for policy in (Lru, Lfu, CostAware, Arc)
    )
    assert min(lfu, cost_aware, arc) > lru * 1.03


@pytest.mark.nightly  # a choice, made once
@pytest.mark.parametrize("capacity", [3000, 10_000])
def test_default_half_life_is_the_best_of_its_neighbours_on_the_first_quarter_of_an_hour(capacity: int) -> None:
    first = [request for request in public_trace() if request.arrival_s < 900.0]
    ratio = {
        half_life_s: measure_eviction(
            "lfu", lambda value=half_life_s: Lfu(LfuConfig(half_life_s=value)), first, capacity=capacity
        ).hit_ratio
        for half_life_s in (100.0, 300.0, 900.0)
    }
    assert max(ratio, key=ratio.__getitem__) == LfuConfig().half_life_s == 300.0


@pytest.mark.slow
@pytest.mark.parametrize("make", [Lru, Lfu, Slru, Arc, CostAware])
def test_policies_by_use_leave_no_orphans_by_themselves(make: Callable[[], EvictionPolicy]) -> None:
    """Who uses a block uses all before it."""
    result = measure_eviction("p", make, public_trace()[:1500], capacity=3000)
    assert (result.num_orphaning, result.num_evictions > 1000) == (0, True)
    chained = measure_eviction("p", make, public_trace()[:1500], capacity=3000, chain_order=True)
    assert attrs.asdict(chained) == attrs.asdict(result)
