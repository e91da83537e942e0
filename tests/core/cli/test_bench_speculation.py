from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from trencadis.errors import ConfigError
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_tools.bench import SpeculationResult
from trencadis_tools.commands import bench as bench_command


@pytest.fixture
def bench(fake_house, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        parser = argparse.ArgumentParser()
        bench_command.add_arguments(parser)
        house = fake_house(speculator=lambda: ScriptedSpeculator(lambda tokens: [1, 2, 3]))
        given = parser.parse_args(["speculation", "--max-tokens", "6", *arguments])
        assert bench_command.run(given, *house) == 0
        return capsys.readouterr().out

    return run


def test_json_has_every_measure_of_every_drafter(bench) -> None:
    told = json.loads(bench("--drafters", "none, fake", "--json"))
    assert [result["drafter"] for result in told] == ["none", "fake"]
    for result in told:
        assert set(result) == {field.name for field in attrs.fields(SpeculationResult)}
        assert result["num_output_tokens"] == 6 * result["num_prompts"]


def test_without_names_every_installed_drafter_is_measured(bench) -> None:
    lines = bench().splitlines()
    assert lines[0].startswith("drafter")
    assert [line.split()[0] for line in lines[1:]] == ["fake"]


def test_prompts_come_from_a_file_up_to_the_limit(bench, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [f"question {i}"]}) for i in range(6)))
    (told,) = json.loads(bench("--prompts", str(path), "--max-requests", "4", "--json"))
    assert told["num_prompts"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-tokens", "0"), "max_tokens"),
        (("--streams", "0"), "num_streams"),
        (("--temperature", "-1"), "temperature"),
        (("--prompts", "nowhere.jsonl"), r"nowhere\.jsonl"),
        (("--drafters", "fkae"), "fkae"),
    ],
)
def test_flags_that_make_no_sense_are_named(bench, arguments, message) -> None:
    with pytest.raises(ConfigError, match=message) if message != "fkae" else pytest.raises(Exception, match="fkae"):
        bench(*arguments)
