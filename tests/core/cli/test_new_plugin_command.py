from __future__ import annotations

import types

import pytest

import trencadis_stages
from trencadis.cli import main as run_main


def test_package_is_written_and_the_next_steps_are_printed(installed, tmp_path, capsys):
    assert run_main(["new-plugin", "scheduling", "lottery", "--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    home = tmp_path / "trencadis-scheduling-lottery"
    assert (home / "src/trencadis_scheduling_lottery/lottery.py").is_file()
    assert f'cd {home} && pip install -e ".[test]" && pytest' in out
    assert '[scheduling] name = "lottery"' in out


def test_observer_is_selected_by_another_key(installed, tmp_path, capsys):
    assert run_main(["new-plugin", "observer", "pager", "--directory", str(tmp_path)]) == 0
    assert '[observer] names = ["log", "pager"]' in capsys.readouterr().out


def test_stage_is_switched_on_by_its_own_table(installed, tmp_path, capsys):
    assert run_main(["new-plugin", "stage", "turnstile", "--directory", str(tmp_path)]) == 0
    assert "Then switch it on: [turnstile] max_running = 8" in capsys.readouterr().out
    assert (tmp_path / "trencadis-stage-turnstile/src/trencadis_stage_turnstile/turnstile.py").is_file()


def test_it_is_written_here_if_nothing_is_said(installed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_main(["new-plugin", "eviction", "lottery"]) == 0
    assert (tmp_path / "trencadis-eviction-lottery/pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedulin", "lottery"], 'Did you mean "scheduling"?'),
        (["scheduling", "Lottery!"], "Use lower-case letters"),
        (["scheduling"], "the following arguments are required: NAME"),
        (["scheduling", "lottery", "--engine.seed", "3"], "unknown argument --engine.seed"),
        (["scheduling", "fcfs"], 'there is a scheduling component "fcfs" already'),
        (["stage", "swap"], 'there is a stage "swap" already: trencadis'),
        (["stage", "cache"], "there is a table [cache] already"),
    ],
)
def test_bad_input_is_refused_in_words(installed, tmp_path, monkeypatch, capsys, words, message):
    installed(trencadis_stages)
    monkeypatch.chdir(tmp_path)
    assert run_main(["new-plugin", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_broken_plugin_keeps_nobody_from_writing_another(installed, tmp_path, capsys):
    broken = types.ModuleType("broken")
    broken.trencadis_bucketings = lambda: ()
    installed(broken)
    assert run_main(["new-plugin", "scheduling", "lottery", "--directory", str(tmp_path)]) == 0


def test_help_lists_no_config_flags(capsys):
    assert run_main(["new-plugin", "--help"]) == 0
    out = capsys.readouterr().out
    assert "NOUN" in out
    assert "--engine.seed" not in out
    assert "--config" not in out
