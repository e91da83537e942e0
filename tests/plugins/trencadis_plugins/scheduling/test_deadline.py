from __future__ import annotations

import numpy as np
import pytest

from trencadis.interfaces import TokenSplit
from trencadis_plugins.scheduling.config import DeadlineConfig
from trencadis_plugins.scheduling.deadline import Deadline
from trencadis_testing.scheduling import SchedulingConformance


class TestDeadline(SchedulingConformance):
    make = Deadline


class TestDeadlineThatSheds(SchedulingConformance):
    may_refuse = True
    counts_tokens = True  # it refuses by the time that each takes
    num_histories = 8

    def make(self):
        return Deadline(DeadlineConfig(shed=True, ttft_target_ms=20.0))


MODEL = {
    "step_ms": 10.0,
    "token_us": 1000.0,
    "context_token_us": 0.0,
    "ttft_target_ms": 1000.0,
    "tpot_target_ms": 100.0,
}


@pytest.fixture
def policy():
    return Deadline(DeadlineConfig(**MODEL))


def test_least_slack_goes_first(view_of, policy):
    """At 5 s the slacks of three prompts are 5.5 - 5 - .11, 6 - 5 - .81 and 5.6 - 5 - .11 s: .39, .19, .49."""
    view = view_of(
        waiting=[0, 1, 2], now_s=5.0, arrival_s={0: 4.5, 1: 5.0, 2: 4.6}, num_tokens={0: 100, 1: 800, 2: 100}
    )
    assert policy.order(view).tolist() == [1, 0, 2]


def test_a_request_s_own_target_goes_before_the_configured_one(view_of, policy):
    view = view_of(waiting=[0, 1], ttft_target_s={1: 0.5})
    assert policy.order(view).tolist() == [1, 0]


def test_who_is_late_anyway_goes_last_by_arrival(view_of, policy):
    """At 5 s everybody that came before 4.11 s has lost."""
    view = view_of(waiting=[0, 1, 2, 3], now_s=5.0, arrival_s={0: 4.9, 1: 4.0, 2: 3.0, 3: 4.2})
    assert policy.order(view).tolist() == [3, 0, 2, 1]


def test_after_the_first_token_the_next_one_has_its_own_deadline(view_of, policy):
    """Preempted with 5 tokens, the first at 4.6 s: due at 4.6 + 5 x 0.1 = 5.1 s."""
    columns = {"num_prompt_tokens": {0: 10, 1: 10}, "num_tokens": {0: 15, 1: 10}, "arrival_s": {0: 0.0, 1: 4.0}}
    first = {0: 4.6}
    assert policy.order(view_of(waiting=[1, 0], now_s=4.5, first_token_s=first, **columns)).tolist() == [1, 0]
    columns["arrival_s"] = {0: 0.0, 1: 4.2}
    assert policy.order(view_of(waiting=[1, 0], now_s=4.5, first_token_s=first, **columns)).tolist() == [0, 1]


def test_most_slack_loses_its_blocks(view_of, policy):
    view = view_of(running=[0, 1, 2], first_token_s={0: 1.0, 1: 1.0, 2: 1.0}, num_tokens={0: 103, 1: 109, 2: 105})
    assert policy.victim(view, candidates=np.array([0, 1, 2], np.int32)) == 1


@pytest.mark.parametrize(("targets", "prefill"), [({}, 88), ({0: 0.05}, 38), ({0: 0.5}, 88)])
def test_prompts_leave_room_for_the_tightest_pace(view_of, policy, targets, prefill):
    """10 ms + 2 decodes and n prompt tokens at 1 ms within 100 ms; a looser target of another does not help."""
    view = view_of(running=[0, 1], tpot_target_s=targets)
    split = policy.split(view, token_budget=512)
    assert split == TokenSplit(512, pytest.approx(prefill, abs=1))


def test_a_looser_target_of_all_is_used(view_of, policy):
    view = view_of(running=[0, 1], tpot_target_s={0: 0.5, 1: 0.3})
    assert policy.split(view, token_budget=512).prefill == pytest.approx(288, abs=1)


@pytest.mark.parametrize(("num_waiting_tokens", "refused"), [(800, False), (900, True)])
def test_only_if_asked_to_hopeless_requests_are_refused(request_of, policy, num_waiting_tokens, refused):
    """10 ms and 1 ms for each of 100 + 800 or 900 tokens, against 1 s."""
    request = request_of(num_prompt_tokens=100)
    shedding = Deadline(DeadlineConfig(**MODEL, shed=True))
    told = shedding.admit(request, num_waiting=3, num_waiting_tokens=num_waiting_tokens)
    assert bool(told) is refused
    assert not refused or told == "its first token would take 1.01 s with 3 before it, its target is 1 s"
    assert policy.admit(request, num_waiting=3, num_waiting_tokens=10**6) == ""


def test_the_request_s_target_decides_whether_it_is_hopeless(request_of):
    shedding = Deadline(DeadlineConfig(**MODEL, shed=True))
    patient = request_of(num_prompt_tokens=100, ttft_target_s=60.0)
    assert shedding.admit(patient, num_waiting=3, num_waiting_tokens=5000) == ""
