"""The twin of the published load of coding agents, against what is published of it: arXiv 2608.00101."""

from __future__ import annotations

import math

import attrs
import pytest

from trencadis_tools.workloads.recipe import Recipe
from trencadis_tools.workloads.summary import reusable_tokens
from trencadis_tools.workloads.workload_file import read_recipe

SESSIONS, CALLS, PROMPT_TOKENS, CACHED_TOKENS = 301e3, 9.3e6, 631e9, 541e9
TURNS_OF_SESSION, CALLS_OF_TURN, WEEK_S = 3.95, 7.83, 7 * 86_400.0


def compare(recipe: Recipe) -> None:
    sessions = recipe.sessions
    assert sessions is not None
    # A user's pause tells where a turn begins, if it is longer than any of a tool.
    told = attrs.evolve(
        recipe,
        sessions=attrs.evolve(
            sessions, think_s=attrs.evolve(sessions.think_s, min=1e6), tool_s=attrs.evolve(sessions.tool_s, max=1e5)
        ),
    )
    workload = told.make()
    num_sessions, requests = recipe.num_requests, workload.requests
    starts = [one.think_s >= 1e6 for one in requests]
    num_turns = num_sessions + sum(starts)
    # The number of turns is geometric, that of calls of a session too: four standard errors.
    near = 4 / math.sqrt(num_sessions)
    assert num_turns / num_sessions == pytest.approx(TURNS_OF_SESSION, rel=near)
    assert len(requests) / num_turns == pytest.approx(CALLS_OF_TURN, rel=near)
    assert len(requests) / num_sessions == pytest.approx(CALLS / SESSIONS, rel=near)
    num_prompt_tokens = sum(one.num_prompt_tokens for one in requests)
    # Long sessions have long prompts: the error of the mean is that of the number of calls.
    assert num_prompt_tokens / len(requests) == pytest.approx(PROMPT_TOKENS / CALLS, rel=near)
    reusable = reusable_tokens(workload)
    within_turns = sum(
        min(found, recipe.prefixes.tokens) if is_start else found
        for found, is_start in zip(reusable, starts, strict=True)
    )
    assert within_turns / num_prompt_tokens == pytest.approx(CACHED_TOKENS / PROMPT_TOKENS, abs=0.01)
    assert sum(reusable) / num_prompt_tokens == pytest.approx(0.943, abs=0.01), "with nothing lost from turn to turn"
    first = [one.arrival_s for one in requests if not one.after]
    assert len(first) / first[-1] == pytest.approx(SESSIONS / WEEK_S, rel=near)


def test_the_twin_has_the_published_numbers() -> None:
    compare(attrs.evolve(read_recipe("twin_agents"), num_requests=500))


@pytest.mark.nightly
def test_the_twin_has_the_published_numbers_within_five_per_cent() -> None:
    compare(attrs.evolve(read_recipe("twin_agents"), num_requests=6_500))
