from __future__ import annotations

import json

import pytest

from trencadis.cli import main

pytestmark = pytest.mark.usefixtures("installed")


def test_every_setting_is_explained_with_its_source(capsys, monkeypatch, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('[scheduling]\nname = "other"\n')
    monkeypatch.setenv("TRENCADIS_ENGINE__SEED", "7")
    assert main(["config", "--explain", "--config", str(file), "--bucketing.exponential.limit", "12"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["setting"].split() == ["setting", "value", "source", "unit", "meaning"]
    assert lines["scheduling.name"].split()[1:3] == ['"other"', "serve.toml"]
    assert lines["engine.seed"].split()[1:4] == ["7", "environment", "TRENCADIS_ENGINE__SEED"]
    limit = lines["bucketing.exponential.limit"].split()[1:]
    assert limit == ["12", "flag", "--bucketing.exponential.limit", "sizes", "Most", "sizes."]


def test_the_explanation_is_also_json(capsys):
    assert main(["config", "--json", "--engine.warmup", "false"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["engine.warmup"]["value"] == "false"
    assert rows["engine.warmup"]["source"] == "flag --engine.warmup"


@pytest.mark.parametrize("form", ["--explain", "--json"])
def test_a_wrong_component_name_is_explained_and_then_refused(capsys, form):
    assert main(["config", form, "--bucketing.name", "exponentail"]) == 2
    captured = capsys.readouterr()
    assert "exponentail" in captured.out
    assert captured.err.startswith(
        'error: [bucketing] name = "exponentail" (from flag --bucketing.name): no such component. '
        'Did you mean "exponential"? Choose one of: '
    )


def test_a_layout_that_the_executor_does_not_serve_is_refused(capsys):
    assert main(["config", "--parallel.tensor", "2", "--executor.name", "inline"]) == 2
    captured = capsys.readouterr()
    assert "parallel.tensor" in captured.out
    assert captured.err.startswith(
        'error: [parallel] tensor = 2 (from flag --parallel.tensor): executor component "inline"'
    )


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_model_that_is_nowhere_is_refused_with_who_named_it(capsys, monkeypatch, key):
    monkeypatch.setenv(f"TRENCADIS_MODEL__{key.upper()}", "/no/such/dir")
    assert main(["config"]) == 2
    assert capsys.readouterr().err.startswith(
        f'error: [model] {key} = "/no/such/dir" (from environment TRENCADIS_MODEL__{key.upper()}): '
        "there is no such file or directory. "
    )


def test_one_table_is_shown_alone(capsys):
    assert main(["config", "engine"]) == 0
    paths = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert "engine.seed" in paths
    assert {path.partition(".")[0] for path in paths} == {"engine"}


def test_an_unknown_table_is_refused_with_a_suggestion(capsys):
    assert main(["config", "enigne"]) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: config: there is no table "enigne". Did you mean "engine"? The tables are: model, ')


def test_the_reference_page_is_printed(capsys):
    assert main(["config", "--reference"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# Configuration\n")
    assert "### `[bucketing.exponential]`\n\nSizes that double.\n" in out


def test_flag_names_are_printed_one_a_line(capsys):
    assert main(["config", "--flags"]) == 0
    flags = capsys.readouterr().out.splitlines()
    assert flags == sorted(flags)
    assert "--bucketing.exponential.max-batch-size" in flags
