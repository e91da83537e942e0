from __future__ import annotations

import pytest

from trencadis.interfaces import TokenSplit
from trencadis.records import Request
from trencadis_plugins.scheduling.config import FcfsConfig
from trencadis_plugins.scheduling.fcfs import Chunks, Fcfs
from trencadis_testing.scheduling import SchedulingConformance


class TestFcfs(SchedulingConformance):
    make = Fcfs
    declares = frozenset({"arrival_order"})


class TestFcfsWithCaps(SchedulingConformance):
    num_histories = 8

    def make(self):
        return Fcfs(FcfsConfig(max_prefill_tokens=20, long_prefill_threshold=7, chunk_sizes=(4, 2)))


class TestFcfsWithATarget(SchedulingConformance):
    num_histories = 8

    def make(self):
        return Fcfs(FcfsConfig(tpot_target_ms=17.5, victim="cheapest"))


@pytest.fixture
def view(view_of):
    return view_of(waiting=[5, 2, 7], running=[4, 0, 6], arrival_s={0: 1, 2: 0.5, 5: 2, 7: 0.1})


def test_everyone_is_admitted_in_the_order_of_the_queue(view):
    """The queue itself holds preempted sequences first, then the others by arrival."""
    request = Request(request_id="a", prompt_token_ids=(1,))
    assert Fcfs().admit(request, num_waiting=10**6, num_waiting_tokens=10**9) == ""
    assert Fcfs().order(view).tolist() == [5, 2, 7]


@pytest.mark.parametrize(("cap", "prefill"), [(0, 512), (100, 100), (512, 512), (600, 512)])
def test_prefill_tokens_of_a_step_are_capped(view, cap, prefill):
    policy = Fcfs(FcfsConfig(max_prefill_tokens=cap))
    assert policy.split(view, token_budget=512) == TokenSplit(decode=512, prefill=prefill)


@pytest.mark.parametrize(
    ("threshold", "num_remaining", "token_budget", "chunk"),
    [(0, 300, 512, 300), (0, 900, 512, 512), (64, 300, 512, 64), (64, 40, 512, 40), (64, 300, 20, 20)],
)
def test_prompt_is_cut_to_budget_and_threshold(view, threshold, num_remaining, token_budget, chunk):
    policy = Fcfs(FcfsConfig(long_prefill_threshold=threshold))
    assert policy.chunk(view, slot=5, num_remaining=num_remaining, token_budget=token_budget) == chunk


PACE = {"tpot_target_ms": 50.0, "step_ms": 10.0, "token_us": 100.0, "context_token_us": 1.0}


def test_step_fills_its_target_exactly(view_of):
    """10 ms + 4 decodes and n prompt tokens at 0.1 ms + 4,000 KV entries at 1 us = 50 ms gives n = 356."""
    view = view_of(running=[0, 1, 2, 3], num_computed_tokens=dict.fromkeys(range(4), 1000))
    chunks = Chunks(FcfsConfig(**PACE))
    budget = chunks.prefill_budget(view, token_budget=2048)
    assert budget == 356
    assert chunks.step_time.step_s(budget + 4, 4000) == pytest.approx(0.050)


@pytest.mark.parametrize(
    ("config", "running", "facts", "options", "budget"),
    [
        (PACE, [0], {}, {"target_s": 0.0305}, 204),  # the target of the call goes before the configured one
        (PACE, [], {}, {}, 2048),
        ({}, [0], {}, {}, 2048),
        # a block even where decodes alone miss the target
        (PACE, [0], {"num_computed_tokens": {0: 10**6}, "block_size": 16}, {}, 16),
        (PACE, [0], {"num_computed_tokens": {0: 10**6}, "block_size": 16}, {"token_budget": 4}, 4),
        ({**PACE, "max_prefill_tokens": 100}, [0], {}, {}, 100),
    ],
)
def test_budget_for_prompts(view_of, config, running, facts, options, budget):
    view = view_of(running=running, **facts)
    assert Chunks(FcfsConfig(**config)).prefill_budget(view, **{"token_budget": 2048, **options}) == budget


@pytest.mark.parametrize(
    ("num_remaining", "token_budget", "chunk"),
    [(1000, 700, 512), (1000, 512, 512), (300, 700, 300), (1000, 100, 64), (1000, 60, 60), (64, 64, 64)],
)
def test_a_part_of_a_prompt_has_one_of_the_sizes_and_its_end_any(num_remaining, token_budget, chunk):
    chunks = Chunks(FcfsConfig(chunk_sizes=(64, 512, 128)))
    assert chunks.chunk(num_remaining=num_remaining, token_budget=token_budget) == chunk
