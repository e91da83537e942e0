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


def test_the_explanation_is_what_comes_without_a_flag(capsys):
    main(["config"])
    plain = capsys.readouterr().out
    main(["config", "--explain"])
    assert capsys.readouterr().out == plain


def test_a_wrong_component_name_can_still_be_explained(capsys):
    assert main(["config", "--bucketing.name", "exponentail"]) == 0
    assert '"exponentail"' in capsys.readouterr().out


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


def test_two_pages_at_once_are_refused(capsys):
    assert main(["config", "--flags", "--reference"]) == 2
    assert "not allowed with argument --flags" in capsys.readouterr().err
