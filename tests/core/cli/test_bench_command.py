from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import attrs
import pytest

from trencadis.config import Config
from trencadis.errors import ConfigValueError
from trencadis.registry import Registry
from trencadis_tools.bench import ThroughputResult, ThroughputWorkload
from trencadis_tools.commands import bench as bench_command

House = Callable[..., tuple[Config, Registry]]


@pytest.fixture
def bench(fake_house: House, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        parser = argparse.ArgumentParser()
        bench_command.add_arguments(parser)
        assert bench_command.run(parser.parse_args(["throughput", *arguments]), *fake_house()) == 0
        return capsys.readouterr().out

    return run


def test_json_has_every_measure(bench: Callable[..., str]) -> None:
    result = json.loads(bench("--num-requests", "3", "--input-len", "9", "--output-len", "5", "--seed", "7", "--json"))
    assert set(result) == {field.name for field in attrs.fields(ThroughputResult)}
    assert (result["num_requests"], result["input_len"], result["output_len"], result["seed"]) == (3, 9, 5, 7)
    assert result["num_output_tokens"] == 15


def test_without_json_a_table_is_printed(bench: Callable[..., str]) -> None:
    printed = bench("--num-requests", "1", "--input-len", "3", "--output-len", "2")
    rows = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert rows["num_output_tokens"] == "2"
    assert float(rows["wall_s"]) > 0


def test_the_flags_are_the_fields_of_the_workload() -> None:
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    args = parser.parse_args(["throughput"])
    names = [field.name for field in attrs.fields(ThroughputWorkload)]
    assert ThroughputWorkload(**{name: getattr(args, name) for name in names}) == ThroughputWorkload()


@pytest.mark.parametrize("flag", ["--num-requests", "--input-len", "--output-len"])
def test_a_count_below_one_is_refused(bench: Callable[..., str], flag: str) -> None:
    with pytest.raises(ConfigValueError, match=flag[2:].replace("-", "_")):
        bench(flag, "0")
