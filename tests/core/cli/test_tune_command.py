from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from trencadis.api import build_engine, load_with_plugins
from trencadis.cli import main
from trencadis.records import Request, SamplingParams
from trencadis_tools.simulation.step_times import LinearStepTimes, step_times_json

WORKLOAD = """
num_requests = 20
[arrivals]
rate = 2.0
[lengths]
prompt = { kind = "lognormal", mean = 300, cv = 0.5, min = 8, max = 900 }
output = { kind = "lognormal", mean = 2, cv = 0.5, min = 1, max = 4 }
"""
START = """
[engine]
max_num_batched_tokens = 128
[cache]
num_blocks = 2000
[log]
level = "warning"
"""
KEPT = "scheduling,eviction,cache,engine.preemption,engine.max_num_seqs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a workload, step times and a configuration, in which the commands run."""
    times = LinearStepTimes(base_s=0.05, token_s=2e-5, context_s=0.0)
    (tmp_path / "steps.json").write_text(json.dumps(step_times_json(times, {})))
    (tmp_path / "few.toml").write_text(WORKLOAD)
    (tmp_path / "start.toml").write_text(START)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tune(folder, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str, slo: str = "ttft_p95=400ms") -> tuple[int, str]:
        given = ["--slo", slo, "--workload", "few.toml", "--config", "start.toml", "--budget", "20", "--limit", "20"]
        code = main(["tune", *given, *arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_a_better_configuration_is_printed_written_and_runs(tune, folder) -> None:
    written = ("--out", "tuned.toml", "--json", "tuned.json")
    code, told = tune("--step-times", "steps.json", "--keep", KEPT, "--no-confirm", "--seed", "5", *written)
    assert code == 0, told
    text = (folder / "tuned.toml").read_text()
    tables = tomllib.loads(text)
    budget = tables["engine"]["max_num_batched_tokens"]
    assert budget > 128
    assert tables["cache"] == {"num_blocks": 2000, "models": "off"}, "the file's, and that of the environment of tests"
    assert "# Was 128. Alone: " in text
    assert "# Nothing was measured: --no-confirm." in text
    one_seed = "One seed: requests were drawn from seed 5 to search with and seed 6 to check with alone"
    assert one_seed in told
    assert f"# {one_seed}" in text
    assert "--seed 5" in text
    assert "Nothing was measured" in told
    assert f"engine.max_num_batched_tokens  128    {budget} " in told
    resolved, registry = load_with_plugins(file=folder / "tuned.toml", environ={})
    engine = build_engine(resolved.config, registry=registry)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add(Request(request_id="a", prompt_token_ids=(1, 2, 3), params=params))
    while engine.has_work:
        engine.step()
    engine.close()

    check_evidence(json.loads((folder / "tuned.json").read_text()))


def check_evidence(evidence) -> None:
    tuning = evidence["tuning"]
    assert tuning["stages"][-1]["num_simulations"] == len(tuning["trials"])
    assert [part["num_requests"] for part in tuning["parts"]] == [20, 20]
    assert tuning["parts"][0]["digest"] != tuning["parts"][1]["digest"]
    assert tuning["capacities"]["best"]["rate"] > tuning["capacities"]["start"]["rate"]
    assert evidence["measured"] == []
    assert evidence["not_measured"] == "--no-confirm"


@pytest.mark.nightly
def test_evidence_is_the_same_each_time(tune, folder) -> None:
    arguments = ("--step-times", "steps.json", "--keep", KEPT, "--no-confirm")
    for name in ("one.json", "two.json"):
        assert tune(*arguments, "--json", name)[0] == 0
    assert (folder / "one.json").read_bytes() == (folder / "two.json").read_bytes()


@pytest.mark.nightly
def test_a_model_that_cannot_run_here_is_not_measured_and_nothing_is_lost(tune, folder) -> None:
    arguments = ("--step-times", "steps.json", "--keep", KEPT, "--model.path", "nowhere", "--out", "tuned.toml")
    code, told = tune(*arguments)
    assert code == 0
    assert "Nothing was measured: an engine cannot run here: " in told
    assert tomllib.loads((folder / "tuned.toml").read_text())["model"] == {"path": "nowhere"}


@pytest.mark.nightly
def test_step_times_of_a_sheet_are_not_measured(tune) -> None:
    code, told = tune("--step-times", "h100:llama_3_1_8b", "--keep", f"{KEPT},engine", "--engine.max-num-seqs", "1")
    assert code == 0
    assert "Nothing was measured: step times of a device sheet say nothing of this machine" in told


@pytest.mark.nightly
def test_with_step_times_from_a_file_the_best_two_and_the_start_are_measured_here(tune, folder) -> None:
    code, told = tune("--step-times", "steps.json", "--keep", KEPT, "--json", "tuned.json")
    assert code == 0, told
    assert "objectives kept in" in told
    measured = json.loads((folder / "tuned.json").read_text())["measured"]
    assert [one["name"] for one in measured] == ["start", "best", "second"]
    assert [len(one["runs"]) for one in measured] == [2, 2, 2]
    assert all(one["values"]["ttft_p95"] > 0 for one in measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "few.toml"], "--slo is missing"),
        (["--slo", "ttft_p99=1s"], "--workload is missing"),
        (["--slo", "fast", "--workload", "few.toml"], '"fast" is no objective'),
        (["--slo", "ttft_p99=1s", "--workload", "nowhere.toml"], "no such workload"),
        (["--slo", "ttft_p99=1s", "--workload", "few.toml", "--budget", "3"], "--budget: 3 is less than 20"),
        (["--slo", "ttft_p99=1s", "--workload", "few.toml", "--step-times", "h101:demo"], "no device sheet"),
        (
            ["--slo", "ttft_p99=1s", "--workload", "burst.toml", "--step-times", "steps.json"],
            "all requests come at once",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(folder, capsys, arguments, message) -> None:
    (folder / "burst.toml").write_text(WORKLOAD.replace("2.0", "inf"))
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_extra_is_said_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert main(["tune", "--slo", "ttft_p99=1s", "--workload", "nowhere.toml"]) == 2
    error = capsys.readouterr().err
    assert "needs scipy, which is not installed. Run pip install" in error
