from __future__ import annotations

import json
import sys
import types

import pytest

from trencadis.cli import main as run_main


def test_findings_are_printed_with_remedies_and_counted(installed, capsys):
    assert run_main(["doctor", "--scheduling.name", "fcsf"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (place,) = (i for i, line in enumerate(lines) if "no such component" in line)
    assert lines[place].startswith('FAIL  components: [scheduling] name = "fcsf" (from flag --scheduling.name)')
    assert lines[place + 1].startswith("      → ")
    assert lines[-1].endswith(", 0 doubtful, 1 wrong; trencadis doctor -v shows all.")
    assert not [line for line in lines if line.startswith("OK")]


def test_what_is_right_is_printed_on_demand(installed, capsys):
    run_main(["doctor"])
    assert "OK " not in capsys.readouterr().out
    run_main(["doctor", "-v"])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("OK ")]) > 10
    assert "shows all" not in lines[-1]


def test_json_has_every_finding_and_nothing_else_is_on_standard_output(installed, capsys):
    noisy = types.ModuleType("noisy")

    def speak(name):
        sys.stdout.write("hello")
        raise AttributeError(name)

    noisy.__getattr__ = speak
    installed(noisy)
    code = run_main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["num_fail"] else 0)
    assert report["num_ok"] + report["num_warn"] + report["num_fail"] == len(report["findings"])
    assert set(report["findings"][0]) == {"section", "severity", "message", "remedy"}
    assert {item["severity"] for item in report["findings"]} <= {"ok", "warn", "fail"}


@pytest.mark.usefixtures("broken_plugin")
def test_broken_plugin_and_broken_config_are_findings_not_errors(tmp_path, capsys):
    file = tmp_path / "serve.toml"
    file.write_text("[engine\n")
    assert run_main(["doctor", "--config", str(file), "--engine.sed=3"]) == 1
    captured = capsys.readouterr()
    assert 'plugin "broken"' in captured.out
    assert "not valid TOML" in captured.out
    assert 'Did you mean "--engine.seed"?' in captured.out
    assert "Traceback" not in captured.out + captured.err


def test_help_lists_the_config_flags(installed, capsys):
    assert run_main(["doctor", "--help-all"]) == 0
    assert "--bucketing.exponential.limit" in capsys.readouterr().out


def test_all_that_is_known_of_a_model_is_printed_if_it_is_named(capsys) -> None:
    run_main(["doctor", "--model.path", "demo"])
    out = capsys.readouterr().out
    assert "ends of a turn: " in out
    assert "chat template: content as text" in out
    assert "plugins:" not in out
    run_main(["doctor"])
    assert "ends of a turn" not in capsys.readouterr().out
