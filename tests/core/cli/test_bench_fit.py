from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.step_records import TRUE, shapes, steps_of, write_steps
from trencadis.errors import ConfigError
from trencadis.records import StepShape
from trencadis_tools.commands import bench as bench_command
from trencadis_tools.simulation.step_times import load_step_times


@pytest.fixture
def bench(fake_house, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        parser = argparse.ArgumentParser()
        bench_command.add_arguments(parser)
        assert bench_command.run(parser.parse_args(["fit", *arguments]), *fake_house()) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def records(tmp_path: Path) -> str:
    return write_steps(steps_of(TRUE, shapes(500), noise=0.02), tmp_path / "steps.jsonl")


def test_a_fit_prints_coefficients_with_units_and_errors_by_kind(bench, records) -> None:
    out = bench("--records", records)
    lines = out.splitlines()
    assert lines[0].startswith("Llama on a processor: 384 steps")
    assert {line.split()[-1] for line in lines if "_s " in line} == {"ms", "µs", "ns"}
    assert [line.split()[0] for line in lines[-4:]] == ["decode", "prefill", "mixed", "all"]


def test_the_file_that_is_written_predicts_what_was_recorded(bench, records, tmp_path) -> None:
    other = write_steps(steps_of(TRUE, shapes(300, seed=9)), tmp_path / "other.jsonl")
    out = str(tmp_path / "times.json")
    told = json.loads(bench("--records", records, "--held-out", other, "--out", out, "--device", "a device", "--json"))
    assert told == json.loads(Path(out).read_text())
    assert told["provenance"]["device"] == "a device"
    assert (told["provenance"]["num_steps"], told["provenance"]["held_out"]) == (480, other)
    assert told["errors"]["all"]["num_steps"] == 280
    assert abs(told["errors"]["all"]["step_sum"]) < 0.01
    shape = StepShape(num_decodes=9, num_decode_tokens=9, num_decode_context=4000)
    assert load_step_times(out).device_s(shape) == pytest.approx(TRUE.device_s(shape), rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs one of --records and --requests"),
        (["--records", "nowhere.jsonl"], r"nowhere\.jsonl"),
        (["--records", "RECORDS", "--warm-up", "-1"], "--warm-up is -1"),
        (["--records", "RECORDS", "--warm-up", "480"], "16 steps are too few"),
        (["--records", "RECORDS", "--leave-out", "speed"], "no coefficient speed"),
        (["--records", "RECORDS", "--out", "/nowhere/times.json"], "cannot be written"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(bench, records, arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(*(records if argument == "RECORDS" else argument for argument in arguments))
