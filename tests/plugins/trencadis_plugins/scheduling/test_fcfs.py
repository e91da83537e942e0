from __future__ import annotations

import numpy as np
import pytest

from trencadis.interfaces import TokenSplit
from trencadis.records import Request
from trencadis_plugins.scheduling.config import FcfsConfig
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_testing.scheduling import SchedulingConformance


class TestFcfs(SchedulingConformance):
    make = Fcfs
    declares = frozenset({"arrival_order"})
    num_histories = 8
    num_rules = 25


class TestFcfsWithCaps(SchedulingConformance):
    num_histories = 8
    num_rules = 25

    def make(self):
        return Fcfs(FcfsConfig(max_prefill_tokens=20, long_prefill_threshold=7, chunk_sizes=(4, 2)))


class TestFcfsWithATarget(SchedulingConformance):
    num_histories = 8
    num_rules = 25

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


def test_youngest_candidate_is_preempted(view):
    assert Fcfs().victim(view, candidates=np.array([4, 0, 6], np.int32)) == 6


def test_running_sequences_never_give_way(view):
    assert not Fcfs.preempts
    assert Fcfs().give_way(view, slot=5, candidates=np.array([4, 0, 6], np.int32)) == -1


def test_decodes_may_use_the_whole_budget_and_prefills_what_is_left(view):
    assert Fcfs().split(view, token_budget=512) == TokenSplit(decode=512, prefill=512)


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
