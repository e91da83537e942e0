from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from trencadis.errors import ConfigError, UnknownComponentError
from trencadis.records import StepTime
from trencadis_tools.bench import ScheduleResult, ScheduleWorkload
from trencadis_tools.commands import bench as bench_command

POLICY = "trencadis_testing.engines:ServeInOrder"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [f"2023-11-16 18:15:{second:02}.5000000,{20 + second},{3 + second % 5}" for second in range(12)]
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return str(file)


@pytest.fixture
def bench(fake_house, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        parser = argparse.ArgumentParser()
        bench_command.add_arguments(parser)
        assert bench_command.run(parser.parse_args(["schedule", *arguments]), *fake_house()) == 0
        return capsys.readouterr().out

    return run


def test_json_has_workload_model_and_every_measure(bench, trace) -> None:
    arguments = (
        "--workload",
        trace,
        "--policies",
        POLICY,
        "--rate",
        "3",
        "--max-requests",
        "8",
        "--seed",
        "5",
        "--json",
    )
    told = json.loads(bench(*arguments))
    assert told["workload"] == attrs.asdict(ScheduleWorkload(rate=3.0, limit=8, seed=5))
    assert told["step_time"] == attrs.asdict(StepTime())
    (result,) = told["results"]
    assert set(result) == {field.name for field in attrs.fields(ScheduleResult)}
    assert (result["policy"], result["num_requests"], told["notes"]) == (POLICY, 8, [])


def test_without_json_a_table_has_a_row_for_each_policy(bench, trace) -> None:
    lines = bench("--workload", trace, "--policies", f"{POLICY}, fake").splitlines()
    assert lines[0].startswith("policy")
    assert [line.split()[0] for line in lines[1:]] == [POLICY, "fake"]


def test_without_names_every_policy_is_measured(bench, trace) -> None:
    assert [line.split()[0] for line in bench("--workload", trace).splitlines()[1:]] == ["fake"]


def test_what_policies_run_without_is_said(fake_house, trace, capsys) -> None:
    config, registry = fake_house()
    speculation, connector = (
        attrs.evolve(table, name=name)
        for table, name in ((config.speculation, "ngram"), (config.kv_connector, "host_offload"))
    )
    config = attrs.evolve(config, speculation=speculation, kv_connector=connector)
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    for flags in ([], ["--json"]):
        assert bench_command.run(parser.parse_args(["schedule", "--workload", trace, *flags]), config, registry) == 0
        told = capsys.readouterr().out
        assert "The policies run without drafts here" in told
        assert "moves bytes, which simulated replicas do not have" in told


def test_step_times_can_be_said(bench, trace) -> None:
    arguments = ("--workload", trace, "--json", "--max-requests", "1")
    slow = json.loads(bench(*arguments, "--step-base-s", "1", "--step-token-s", "0", "--step-context-token-s", "0"))
    assert slow["results"][0]["ttft_mean_s"] == 1.0


def test_the_flags_are_the_fields_of_the_workload() -> None:
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    args = parser.parse_args(["schedule"])
    assert args.rate is None  # as the workload has them, which is 0 there
    names = [field.name for field in attrs.fields(ScheduleWorkload) if field.name != "rate"]
    assert ScheduleWorkload(**{name: getattr(args, name) for name in names}) == ScheduleWorkload()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--workload is missing"),
        (("--workload", "no/such/file.csv"), "no such workload"),
        (("--workload", "TRACE", "--max-requests", "0"), "limit"),
        (("--workload", "TRACE", "--ttft-target-s", "0"), "ttft_target_s"),
        (("--workload", "TRACE", "--step-base-s", "-1"), "base_s"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(bench, trace, arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(*(trace if argument == "TRACE" else argument for argument in arguments))


def test_a_policy_that_there_is_not_is_put_down_to_the_flag(bench, trace) -> None:
    with pytest.raises(UnknownComponentError, match=r'name = "nope" \(from flag --policies\): no such component'):
        bench("--workload", trace, "--policies", "fake,nope")
