from __future__ import annotations

import math
from typing import ClassVar

import pytest

from support.simulation import asked, mixed, printed_under_hash_seeds, run
from trencadis.errors import ConfigValueError, StepFailedError
from trencadis.interfaces import Router, SchedulingPolicy
from trencadis_tools.simulation import ReplicaEvent

HERE = "tests.plugins.trencadis_tools.simulation.test_fleet"
ALONE_S = 0.02 + 20e-4 + 20e-6
"""The step of a prompt of 20 tokens alone."""


class InTurn(Router):
    """One after the other; keeps what it was shown of loads."""

    seen: ClassVar[list[tuple[list[int], list[int], list[int]]]] = []

    def __init__(self):
        type(self).seen = []
        self._next = 0

    def peek(self, request, replicas):
        healthy = replicas.is_healthy.nonzero()[0]
        return int(healthy[self._next % len(healthy)])

    def select(self, request, replicas):
        loads = replicas.num_live, replicas.num_running, replicas.num_waiting
        type(self).seen.append(tuple(array.tolist() for array in loads))
        chosen = self.peek(request, replicas)
        self._next += 1
        return chosen


class SeesPrefixes(InTurn):
    """Keeps what it was shown of prefixes."""

    needs_prefixes = True
    found: ClassVar[list[list[int]]] = []

    def select(self, request, replicas):
        type(self).found.append(replicas.hit_blocks.tolist())
        return super().select(request, replicas)


class Nowhere(Router):
    def peek(self, request, replicas):
        return -1


class RefusesLong(SchedulingPolicy):
    def admit(self, request, *, num_waiting, num_waiting_tokens):
        return "a long prompt" if len(request.prompt_token_ids) > 30 else ""


def serial(**engine):
    """Tables of engines that plan one step after the other."""
    return {"engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False, **engine}}


def test_a_request_alone_takes_what_the_step_times_say():
    (record,) = run([asked("a", 1.5, output=3)]).records
    assert record.sent_s == 1.5
    assert record.ttft_s == pytest.approx(ALONE_S)
    assert record.e2e_s == pytest.approx(ALONE_S + 2 * 0.0201 + 21e-6 + 22e-6)
    assert (record.num_output_tokens, record.num_cached_tokens, record.error) == (3, 0, "")


def test_replicas_compute_side_by_side_each_by_its_own_clock():
    alone = run([asked("a", output=9)]).records[0]
    beside = run([asked("a", output=9), asked("b", output=9)], {"router": {"name": f"{HERE}:InTurn"}}, replicas=2)
    assert [one.replica for one in beside.records] == [0, 1]
    assert [one.finished_s for one in beside.records] == [alone.finished_s] * 2
    assert beside.busy_s[0] == beside.busy_s[1] > 0


def test_a_follower_is_sent_when_the_answer_came_and_its_time_to_think_is_over_and_finds_its_context_cached():
    first, second = run([asked("a", output=6), asked("b", 0.05, 40, after="a", think_s=2.0)]).records
    assert second.sent_s == first.finished_s + 2.0
    assert second.num_cached_tokens == 24  # of 26 - 1 tokens with KV, whole blocks of 4
    first, second = run([asked("a", output=6), asked("b", 9.0, 40, after="a", think_s=2.0)]).records
    assert second.sent_s == 9.0


def test_equal_block_ids_are_cached_blocks_and_other_tokens_are_shared_with_nobody():
    one, two, three = run(
        [
            asked("a", 0.0, 20, block_ids=(1, 2, 3)),
            asked("b", 1.0, 12, block_ids=(1, 2, 3), tenant="another"),
            asked("c", 2.0, 20, block_ids=(1, 7)),
        ]
    ).records
    assert [one.num_cached_tokens, two.num_cached_tokens, three.num_cached_tokens] == [0, 8, 4]


def test_a_router_sees_ends_when_they_happen_and_not_before():
    """a is answered after one step; b is sent in the middle of it, c after it."""
    run(
        [asked("a", output=1), asked("b", ALONE_S / 2), asked("c", ALONE_S * 1.01)],
        {"router": {"name": f"{HERE}:InTurn"}, **serial()},
        replicas=2,
    )
    assert [live for live, _, _ in InTurn.seen] == [[0, 0], [1, 0], [0, 1]]


def test_a_router_sees_what_is_cached_of_requests_that_have_ended():
    SeesPrefixes.found = []
    same = {"prompt": 21, "output": 1, "block_ids": (1, 2, 3, 4, 5)}
    run(
        [asked("a", **same), asked("b", 100.0, **same), asked("c", 200.0, **same)],
        {"router": {"name": f"{HERE}:SeesPrefixes"}, **serial()},
        replicas=2,
    )
    num_blocks = max(map(max, SeesPrefixes.found))
    assert SeesPrefixes.found == [[0, 0], [num_blocks, 0], [num_blocks, num_blocks]]
    assert num_blocks


def test_prefix_affinity_finds_more_in_caches_than_turns_do():
    by_name = {
        name: run(mixed(), {"router": {"name": name}}, replicas=4).num_prompt_tokens_cached
        for name in ("round_robin", "prefix_affinity")
    }
    assert by_name["prefix_affinity"] > 1.2 * by_name["round_robin"] > 0


def test_prefix_affinity_finds_what_requests_that_have_ended_left_in_caches():
    """Turns come one after the other, when nothing is live: only what replicas said of their caches can tell where they go."""
    turns = [asked("a0", 0.0, 20)] + [asked(f"a{i}", 5.0 * i, 20 + 20 * i, after=f"a{i - 1}") for i in range(1, 4)]
    records = run(turns, {"router": {"name": "prefix_affinity"}}, replicas=3).records
    assert len({one.replica for one in records}) == 1
    assert all(one.num_cached_tokens for one in records[1:])


def test_requests_of_a_failed_replica_go_on_elsewhere_after_their_tokens():
    requests = [asked("a", output=12), asked("b", output=12)]
    table = {"router": {"name": f"{HERE}:InTurn"}, **serial()}
    whole = run(requests, table, replicas=2)
    fails_s = whole.records[0].first_token_s + 5.5 * 0.0201
    broken = run(requests, table, replicas=2, events=[ReplicaEvent(time_s=fails_s, replica=0, kind="fail")])
    moved, other = broken.records
    assert (moved.replica, moved.num_output_tokens, moved.error, broken.num_moved) == (1, 12, "", 1)
    assert moved.first_token_s == whole.records[0].first_token_s
    assert moved.finished_s > whole.records[0].finished_s
    # It had its prompt, 5 decodes, and one whose token was lost; then its 20 + 6 tokens anew, and the 5 decodes that were left.
    assert broken.num_scheduled_tokens == whole.num_scheduled_tokens // 2 + (20 + 5 + 1) + (20 + 6 + 5)
    assert other.num_output_tokens == 12


def test_a_drained_replica_ends_what_it_has_and_one_that_joins_begins_with_an_empty_cache():
    requests = [asked(f"r{i}", i * 0.5, 20, 3, block_ids=(1, 2, 3)) for i in range(12)]
    events = [ReplicaEvent(time_s=1.01, replica=0, kind="drain"), ReplicaEvent(time_s=3.2, replica=0, kind="join")]
    table = {"router": {"name": "round_robin"}, **serial()}
    run_ = run(requests, table, replicas=2, events=events)
    assert [one.replica for one in run_.records] == [0, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0]
    assert [one.num_cached_tokens for one in run_.records] == [0, 0, 12, 12, 12, 12, 12, 0, 12, 12, 12, 12]


def test_a_replica_whose_first_event_is_a_join_is_not_there_before_and_requests_without_one_wait():
    events = [ReplicaEvent(time_s=5.0, replica=0, kind="join"), ReplicaEvent(time_s=6.0, replica=1, kind="join")]
    first, second = run([asked("a", 1.0), asked("b", 7.0)], replicas=2, events=events).records
    assert (first.sent_s, first.replica) == (1.0, 0)
    assert first.first_token_s == pytest.approx(5.0 + ALONE_S)
    assert second.replica == 1


def test_requests_that_no_replica_is_left_for_have_an_error():
    broken = run(
        [asked("a", output=99), asked("b", 1.0, 140, after="a")],
        replicas=1,
        events=[ReplicaEvent(time_s=0.1, replica=0, kind="fail")],
    )
    assert [one.error for one in broken.records] == ["no replica serves", "'a', which it follows, had no answer"]
    assert math.isnan(broken.records[0].finished_s)


def test_what_a_policy_refuses_has_its_reason_and_so_has_what_follows_it():
    refused, follower, short = run(
        [asked("a", 0.0, 40), asked("b", 0.0, 60, after="a"), asked("c")],
        {"scheduling": {"name": f"{HERE}:RefusesLong"}},
    ).records
    assert "a long prompt" in refused.error
    assert "follows" in follower.error
    assert short.error == ""


def test_a_router_that_breaks_its_contract_is_no_result():
    with pytest.raises(StepFailedError, match="router"):
        run([asked("a")], {"router": {"name": f"{HERE}:Nowhere"}}, replicas=2)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([(1.0, 2, "fail")], "there are replicas 0 to 1"),
        ([(1.0, 0, "join"), (2.0, 0, "join")], "serves already"),
        ([(1.0, 0, "fail"), (2.0, 0, "drain")], "has failed or drains already"),
    ],
)
def test_events_that_cannot_happen_are_refused_in_words(events, message):
    made = [ReplicaEvent(time_s=time_s, replica=replica, kind=kind) for time_s, replica, kind in events]
    with pytest.raises(ConfigValueError, match=message):
        run([asked("a")], replicas=2, events=made)


def test_a_request_that_only_follows_shares_what_its_blocks_say():
    _, second = run([asked("a", output=6), asked("b", 0.05, 40, after="a", block_ids=(7,))]).records
    assert (second.num_cached_tokens, second.num_output_tokens) == (0, 5)


PRINTED = """
import sys; sys.path[:0] = ["tests", "."]
from support.simulation import mixed, run
from trencadis_tools.simulation import ReplicaEvent
events = [ReplicaEvent(time_s=t, replica=r, kind=k) for t, r, k in ((.3, 1, "fail"), (.5, 2, "drain"), (.9, 1, "join"))]
print(repr(run(mixed(), {"router": {"name": "prefix_affinity"}, "scheduling": {"name": "fair_share"}}, replicas=3, events=events).records))
"""


@pytest.mark.nightly
def test_equal_inputs_give_equal_bytes_whatever_the_hash_seed():
    printed = printed_under_hash_seeds(PRINTED)
    assert len(printed) == 1
    assert len(printed.pop()) > 1000
