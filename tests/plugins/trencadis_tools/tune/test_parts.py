"""Parts of a workload: to search with, and to check with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.errors import ConfigError
from trencadis_tools.tune.tune import parts_of
from trencadis_tools.workloads import load_workload

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
