from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis_tools.workloads.distributions import Distribution
from trencadis_tools.workloads.sessions import Sessions, session_calls
from trencadis_tools.workloads.workload import Workload, WorkloadRequest

FIRST = WorkloadRequest(
    request_id="7", arrival_s=3.0, num_prompt_tokens=100, num_output_tokens=20, tenant="t", priority=2, block_ids=(5,)
)
ANSWERS = Distribution(kind="lognormal", mean=60.0)


def calls(sessions: Sessions, first: WorkloadRequest = FIRST, index: int = 0, seed: int = 0) -> list[WorkloadRequest]:
    return list(session_calls(sessions, first, ANSWERS, seed=seed, index=index))


@given(
    turns=st.floats(1, 8),
    per_turn=st.floats(1, 8),
    limit=st.sampled_from([0, 400, 2000]),
    blocks=st.sampled_from([(), (5,)]),
    index=st.integers(0, 50),
)
def test_a_session_is_a_chain_whose_prompts_go_on_or_are_cut(turns, per_turn, limit, blocks, index) -> None:
    cut = limit // 2
    sessions = Sessions(mean_turns=turns, mean_calls=per_turn, max_context_tokens=limit, cut_tokens=cut)
    made = calls(sessions, attrs.evolve(FIRST, block_ids=blocks), index)
    Workload(name="w", requests=tuple(made), block_tokens=50)  # which checks ids, order and lengths
    for before, one in itertools.pairwise(made):
        assert one.after == before.request_id
        assert (one.session, one.tenant, one.priority, one.arrival_s) == ("7", "t", 2, 3.0)
        goes_on = before.num_prompt_tokens + before.num_output_tokens
        if one.continues:
            assert one.num_prompt_tokens > goes_on
        else:
            assert limit
            assert one.num_prompt_tokens <= cut
            assert one.block_ids == blocks or not blocks
        assert not limit or one.num_prompt_tokens <= max(limit, cut)


def test_turns_and_calls_have_their_means_and_pauses_are_of_their_kind() -> None:
    """A product of geometric numbers: 4 turns of 3 calls, each with the standard error of its own variance."""
    sessions = Sessions(
        mean_turns=4.0,
        mean_calls=3.0,
        user_tokens=Distribution(mean=11.0),
        tool_tokens=Distribution(mean=7.0),
        think_s=Distribution(mean=60.0),
        tool_s=Distribution(mean=2.0),
    )
    made = [calls(sessions, index=index) for index in range(1500)]
    num_calls = np.array([len(one) for one in made])
    num_turns = np.array([1 + sum(call.think_s == 60.0 for call in one) for one in made])
    assert abs(num_turns.mean() - 4) < 4 * np.sqrt((16 - 4) / 1500)
    assert abs(num_calls.mean() - 12) < 4 * np.sqrt((144 - 12) / 1500)
    for before, one in itertools.pairwise(made[0]):
        new = one.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens
        assert (new, one.think_s) in {(11, 60.0), (7, 2.0)}


@pytest.mark.parametrize(("turns", "per_turn", "pause_s"), [(5.0, 1.0, 60.0), (1.0, 5.0, 2.0)])
def test_a_turn_begins_after_its_calls(turns: float, per_turn: float, pause_s: float) -> None:
    pauses = {"think_s": Distribution(mean=60.0), "tool_s": Distribution(mean=2.0)}
    sessions = Sessions(mean_turns=turns, mean_calls=per_turn, **pauses)
    found = [one.think_s for index in range(9) for one in calls(sessions, index=index) if one.after]
    assert len(found) > 9
    assert set(found) == {pause_s}


def test_a_call_is_drawn_by_its_place_in_its_session_alone() -> None:
    few, many = (Sessions(mean_turns=turns, mean_calls=2.0) for turns in (3.0, 30.0))
    short, long = calls(few), calls(many)
    assert len(short) < len(long)
    assert [one.num_output_tokens for one in long[1 : len(short)]] == [one.num_output_tokens for one in short[1:]]
    assert calls(few, seed=1) != short


@pytest.mark.parametrize("cut", [0, 9])
def test_a_context_is_cut_to_less_than_its_limit(cut: int) -> None:
    with pytest.raises(ValueError, match="cut_tokens"):
        Sessions(max_context_tokens=9, cut_tokens=cut)
