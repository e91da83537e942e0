from __future__ import annotations

import json
from pathlib import Path

import pytest

from trencadis.cli import main
from trencadis_server.batch.lines import ENDPOINTS, read_line
from trencadis_server.commands.run_batch import run

EXAMPLE = Path(__file__).parents[3] / "examples" / "batch.jsonl"


class Arguments:
    errors = None

    def __init__(self, source, output) -> None:
        self.input, self.output = source, output


def line(name, **body):
    content = {"model": "demo", "prompt": [5, 6], "max_tokens": 2, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": content})


@pytest.mark.parametrize(
    ("lines", "code", "summary"),
    [([line("a")], 0, "1 answered, 0 failed"), ([line("a"), "x"], 1, "1 answered, 1 failed")],
)
def test_the_exit_code_says_whether_a_line_failed(lines, code, summary, fake_house, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    assert run(Arguments(source, output), *fake_house()) == code
    assert f"{output}: {summary}, 0 done before" in capsys.readouterr().out
    assert len(output.read_text().splitlines()) == len(lines)


def test_a_missing_input_ends_it_with_2_and_words(tmp_path, capsys):
    assert main(["run-batch", "-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 2
    assert "none.jsonl: cannot be read: No such file" in capsys.readouterr().err


def test_input_and_output_must_be_named(capsys):
    assert main(["run-batch", "-i", "x"]) == 2
    assert "-o/--output" in capsys.readouterr().err


def test_the_example_has_a_line_for_every_endpoint():
    lines = [read_line(text, number) for number, text in enumerate(EXAMPLE.read_bytes().splitlines(), start=1)]
    assert len({line.custom_id for line in lines}) == len(lines) == 6
    assert {line.url for line in lines} == set(ENDPOINTS)
