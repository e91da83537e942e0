from __future__ import annotations

import json
from pathlib import Path

import pytest

from trencadis.cli import main
from trencadis_tools.workloads import builtin_names, load_workload


@pytest.fixture
def workload(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> str:
        assert main(["workload", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_without_a_name_those_of_the_package_are_listed(workload) -> None:
    assert workload().split() == builtin_names()
    assert json.loads(workload("--json")) == builtin_names()


def test_a_workload_is_printed_in_numbers(workload) -> None:
    lines = workload("dynamo_agents").splitlines()
    assert lines[0] == "dynamo_agents, seed 0: 17 requests, 15 of them after an answer, 5 sessions"
    assert lines[1].startswith("arrivals: 0.0321 sessions a second in 31 s")
    assert lines[3].split()[:3] == ["prompt", "tokens", "3,913"]
    assert lines[5].split()[:2] == ["pause", "s"]
    assert lines[6] == "reusable: 71.7% of prompt tokens, by a prefix cache without limit"


def test_tenants_and_priorities_are_counted_most_first(workload) -> None:
    lines = workload("tenants", "--max-requests", "200").splitlines()
    (tenants,) = [line for line in lines if line.startswith("tenants: 0 ")]
    assert tenants.endswith("and 2 more")
    assert any(line.startswith("priorities: 1 ") for line in lines)


def test_json_has_the_numbers_and_none_for_what_there_is_not(workload) -> None:
    told = json.loads(workload("poisson", "--json", "--max-requests", "50", "--rate", "7", "--seed", "3"))
    assert (told["num_requests"], told["seed"], told["num_following"]) == (50, 3, 0)
    assert told["think_s"]["mean"] is None
    slow = json.loads(workload("poisson", "--json", "--max-requests", "50", "--rate", "1", "--seed", "3"))
    assert slow["prompt_tokens"] == told["prompt_tokens"]
    assert slow["span_s"] == pytest.approx(7 * told["span_s"])


def test_what_is_written_is_the_same_workload(workload, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    first = workload("chat", "--max-requests", "30", "--write", str(file))
    assert load_workload(str(file)) == load_workload("chat", limit=30)
    assert workload(str(file)) == first


def test_requests_at_once_have_no_rate(workload) -> None:
    assert "arrivals: at once" in workload("poisson", "--rate", "inf", "--max-requests", "5")
