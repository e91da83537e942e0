"""Parts of a workload: to search with, and to check with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.errors import ConfigError
from trencadis_tools.tune.tune import fitting, parts_of
from trencadis_tools.workloads import WorkloadRequest, load_workload

DRAWN = """
num_requests = 100
seed = 7
[arrivals]
rate = 2.0
[lengths]
prompt = 50
output = { kind = "lognormal", mean = 20, cv = 1.0, min = 1, max = 90 }
"""


def drawn(folder: Path, more: str = "") -> str:
    file = folder / "drawn.toml"
    file.write_text(DRAWN + more)
    return str(file)


def trace(folder: Path, num: int) -> str:
    rows = [f"2023-11-16 18:15:{second:02}.5000000,{20 + second},{1 + second}" for second in range(num)]
    file = folder / "trace.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return str(file)


def test_of_a_workload_that_is_drawn_the_last_part_has_the_next_seed(tmp_path: Path) -> None:
    name = drawn(tmp_path)
    parts, names = parts_of(name, 80)
    assert [len(part.requests) for part in parts] == [20, 40, 80, 80]
    assert names.rungs == ["first 20", "first 40", "first 80"] == [part.name for part in parts[:3]]
    held_out = load_workload(name, seed=8).requests[:80]
    assert [one.num_output_tokens for one in parts[3].requests] == [one.num_output_tokens for one in held_out]


def test_of_a_trace_the_last_part_follows_and_begins_at_0(tmp_path: Path) -> None:
    parts, _ = parts_of(trace(tmp_path, 50), 500)
    assert [len(part.requests) for part in parts] == [25, 25]
    assert [one.num_prompt_tokens for one in parts[1].requests] == [20 + second for second in range(25, 50)]
    assert parts[1].requests[0].arrival_s == 0


def test_how_long_answers_may_be_is_the_same_in_every_part(tmp_path: Path) -> None:
    parts, _ = parts_of(trace(tmp_path, 50), 500)
    assert {one.max_tokens for part in parts for one in part.requests} == {50}


def test_requests_that_follow_one_of_another_part_are_left_out(tmp_path: Path) -> None:
    sessions = "[sessions]\nmean_turns = 4\nuser_tokens = 5\nthink_s = 3\n"
    name = drawn(tmp_path, sessions)
    parts, _ = parts_of(name, 60)
    for part in parts:
        known = {one.request_id for one in part.requests}
        assert all(not one.after or one.after in known for one in part.requests)


def test_a_short_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="39 requests are too few: 20 are needed to search with"):
        parts_of(trace(tmp_path, 39), 500)


def test_requests_that_a_model_cannot_take_are_left_out_and_counted(tmp_path: Path) -> None:
    """Request i has 21 + 2 i tokens: the first 45 of 50 have at most 110."""
    parts, names = parts_of(trace(tmp_path, 50), 500, max_model_len=110)
    assert [len(part.requests) for part in parts] == [22, 22]
    assert max(one.num_prompt_tokens + one.num_output_tokens for part in parts for one in part.requests) <= 110
    assert names.left_out.startswith("5 of 50 requests are left out")
    assert "the 110 tokens that this model takes; the longest has 119" in names.left_out
    assert parts_of(trace(tmp_path, 50), 500, max_model_len=119)[1].left_out == ""


def test_what_follows_a_request_that_is_left_out_is_left_out_too() -> None:
    lengths = {"a": (10, ""), "b": (50, "a"), "c": (10, "b"), "d": (10, "c"), "e": (10, "a"), "f": (49, "")}
    requests = tuple(
        WorkloadRequest(request_id=key, arrival_s=0.0, num_prompt_tokens=num, num_output_tokens=1, after=after)
        for key, (num, after) in lengths.items()
    )
    assert [one.request_id for one in fitting(requests, 50)] == ["a", "e", "f"]
    assert fitting(requests, None) == requests


def test_too_few_requests_that_a_model_can_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"10 requests are too few: .* 40 of 50 requests are left out") as refused:
        parts_of(trace(tmp_path, 50), 500, max_model_len=39)
    assert "--step-times" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="50 of 50 requests are left out"):
        parts_of(trace(tmp_path, 50), 500, max_model_len=20)
