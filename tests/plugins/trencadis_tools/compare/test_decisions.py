"""What a comparison says beside its verdicts: whether decisions differed, and what a policy reads that no request has."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest

from trencadis.cli import main
from trencadis_tools.compare.candidates import candidates_of
from trencadis_tools.compare.decisions import num_served_otherwise
from trencadis_tools.compare.reads import WatchedRegistry
from trencadis_tools.simulation import simulate
from trencadis_tools.simulation.step_times import LinearStepTimes
from trencadis_tools.workloads import load_workload

LOAD = """
num_requests = 30
[arrivals]
rate = 40.0
[lengths]
prompt = { kind = "uniform", min = 10, max = 400 }
output = { kind = "uniform", min = 2, max = 12 }
"""
OWN = """
from trencadis.interfaces import SchedulingPolicy


def urgency(view, slots):
    return view.priority[slots]


class Urgent(SchedulingPolicy):
    def order(self, view):
        return view.waiting[urgency(view, view.waiting).argsort(kind="stable")]
"""


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRENCADIS_LOG__LEVEL", "warning")
    Path("load.toml").write_text(LOAD)
    Path("urgent_policy.py").write_text(OWN)

    def run(*policies: str) -> str:
        words = [*policies, "--workload", "load.toml", "--seeds", "2", "--no-sensitivity", "--engine.max-num-seqs=2"]
        assert main(["compare", *words]) == 0
        return capsys.readouterr().out

    return run


def test_a_policy_that_decided_nothing_otherwise_is_said_so(compare) -> None:
    out = compare("fcfs", "priority")
    assert "priority: no decision differed from those of fcfs. All 60 requests had the same times." in out
    assert "All requests have the same priority, which priority reads: [priorities] of a workload file gives it." in out
    Path("load.toml").write_text(LOAD + "[priorities]\nshares = [1, 1]\n")
    out = compare("fcfs", "priority")
    assert "no decision differed" not in out
    assert "the same priority" not in out


@pytest.mark.parametrize(
    ("policy", "said", "table"),
    [
        (
            "deadline",
            "No request has ttft_target_s or tpot_target_s, which deadline reads",
            "[targets]\nttft_s = 1\ntpot_s = 1\n",
        ),
        ("fair_share", "All requests are of the same tenant, which fair_share reads", "[tenants]\nnum = 3\n"),
        (
            "urgent_policy:Urgent",
            "All requests have the same priority, which urgent_policy:Urgent reads",
            "[priorities]\nshares = [1, 1]\n",
        ),
    ],
)
def test_what_a_policy_reads_and_no_request_has_is_said(compare, policy, said, table) -> None:
    assert said in compare("fcfs", policy)
    Path("load.toml").write_text(LOAD + table)
    assert said not in compare("fcfs", policy)


def test_watching_changes_no_run(compare) -> None:
    workload = load_workload("load.toml")
    for one in candidates_of(["fcfs", "deadline", "fair_share", "shortest_first", "urgent_policy:Urgent"]):
        watched = WatchedRegistry(one.registry)
        plain, seen = (
            simulate(one.config, registry, workload, step_times=LinearStepTimes())
            for registry in (one.registry, watched)
        )
        assert plain == seen
    assert watched.reads >= {"waiting", "priority"}
    assert "ttft_target_s" not in watched.reads


def test_requests_are_counted_that_were_served_otherwise(make_workload, make_run) -> None:
    run = make_run(make_workload(num=10))
    assert num_served_otherwise([run], [run]) == 0
    near = [attrs.evolve(one, finished_s=one.finished_s + 1e-9) for one in run.records]
    assert num_served_otherwise([run], [attrs.evolve(run, records=tuple(near))]) == 0
    other = list(run.records)
    other[3] = attrs.evolve(other[3], finished_s=other[3].finished_s + 1e-3)
    other[5] = attrs.evolve(other[5], replica=1)
    other[7] = attrs.evolve(other[7], first_token_s=np.nan, finished_s=np.nan, error="refused")
    assert num_served_otherwise([run], [attrs.evolve(run, records=tuple(other))]) == 3
