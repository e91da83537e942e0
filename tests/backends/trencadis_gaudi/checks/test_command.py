from __future__ import annotations

import json

import pytest

from trencadis.cli import main
from trencadis_gaudi.checks.records import Found
from trencadis_gaudi.checks.report import vendor_environment
from trencadis_gaudi.checks.table import GROUPS, TABLE, checks_of

EMULATED = ["gaudi-check", "--backend.gaudi.device", "emulated"]


@pytest.fixture
def found(monkeypatch):
    """What checks find, by name; all that is not named holds."""
    changed = {}

    def run_group(group, options, *, timeout_s, note, only):
        for check in checks_of(group):
            note(check.result(group, changed.get(check.name, Found(True, "as | expected")), seconds=1.25))

    monkeypatch.setattr("trencadis_gaudi.checks.processes.run_group", run_group)
    return changed


def test_lines_are_printed_and_all_well_is_0(found, capsys):
    assert main(EMULATED) == 0
    said = capsys.readouterr().out
    assert said.startswith("The device is emulated: this proves that the command works, and nothing about a Gaudi.")
    assert "OK    lazy: 64-bit integers: as | expected (1.2 s)\n" in said
    assert "0 doubtful, 0 failed, 0 not tested" in said
    assert all(f"{group}: " in said for group in GROUPS)


def test_failure_is_1_and_says_what_it_means_and_doubt_is_not(found, capsys):
    found["FusedSDPA"] = Found(False, "largest difference 3")
    assert main([*EMULATED, "--modes", "compile"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  compile: FusedSDPA: largest difference 3 (1.2 s)\n      expected: within 0.03" in said
    assert "      → The kernel is missing or wrong: set backend.gaudi.fused_sdpa = false." in said
    assert "lazy: " not in said
    found.clear()
    found["float64"] = Found(False, "")
    assert main(EMULATED) == 0
    assert "3 doubtful, 0 failed" in capsys.readouterr().out


def test_checks_that_are_not_tested_for_one_reason_are_counted(found, capsys):
    found |= {check.name: Found(None, "no device") for check in checks_of("eager")[3:]}
    found["KV cache"] = Found(True, "right")
    assert main([*EMULATED, "--modes", "eager"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("SKIP") or "KV cache" in line]
    names = [check.name for check in checks_of("eager")]
    at = names.index("KV cache")
    assert lines[:5] == [
        f"SKIP  eager: {names[3]}: no device (1.2 s)",
        f"SKIP  eager: {at - 4} more for the same reason",
        "OK    eager: KV cache: right (1.2 s)",
        f"SKIP  eager: {names[at + 1]}: no device (1.2 s)",
        f"SKIP  eager: {len(names) - at - 2} more for the same reason",
    ]


def test_missing_software_is_one_finding(capsys):
    assert main(["gaudi-check", "--modes", "eager", "--only", "release", "--only", "autoload", "default mode"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  software: release: habana-torch-plugin is not installed" in said
    assert "SKIP  software: autoload: habana-torch-plugin is not installed" in said
    assert said.endswith("0 ok, 0 doubtful, 1 failed, 2 not tested\n")


@pytest.fixture
def reported(found, tmp_path, monkeypatch):
    """``reported(ending)`` is the text of a report of one doubtful check, which does not hold secrets."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    found["float64"] = Found(False, "other")

    def text(ending):
        assert main([*EMULATED, "--output", str(tmp_path / f"report.{ending}")]) == 0
        return (tmp_path / f"report.{ending}").read_text()

    return text


def test_report_for_people_has_machine_environment_and_what_is_doubtful(reported):
    text = reported("md")
    assert "hidden" not in text
    assert "as \\| expected" in text
    assert "* lazy: float64: other. float64 has another width than expected." in text
    assert "| PT_HPU_LAZY_MODE | 1 |" in text
    assert "nothing about a Gaudi" in text


def test_report_for_programs_has_every_check(reported):
    report = json.loads(reported("json"))
    assert report["emulated"] is True
    assert report["environment"] == {"PT_HPU_LAZY_MODE": "1"}
    assert {"system", "Python", "torch", "hl-smi"} <= report["machine"].keys()
    assert len(report["checks"]) == sum(len(check.groups) for check in TABLE) == sum(report["counts"].values())
    (wrong,) = [one for one in report["checks"] if one["name"] == "float64" and one["group"] == "lazy"]
    assert (wrong["status"], wrong["seconds"]) == ("warn", 1.25)
    assert wrong["meaning"]


def test_secrets_are_left_out_of_the_environment():
    assert vendor_environment({"HABANA_X": "1", "VLLM_API_KEY": "2", "PT_TOKEN": "3", "HOME": "4"}) == {"HABANA_X": "1"}


def test_time_must_be_positive_and_checks_known(capsys):
    assert main([*EMULATED, "--timeout", "0"]) == 2
    assert main([*EMULATED, "--only", "luck"]) == 2
    assert "luck" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["eager", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("lazy", "compile"))]
)
def test_every_check_of_an_engine_holds_on_the_emulated_device(mode, tmp_path):
    path = tmp_path / "report.json"
    names = [check.name for check in checks_of(mode)]
    assert main([*EMULATED, "--modes", mode, "--only", *names, "-o", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["counts"]["fail"] == report["counts"]["warn"] == 0
    assert {one["name"] for one in report["checks"] if one["status"] == "ok"} >= {
        "engine",
        "greedy text",
        "seeded text",
    }


@pytest.mark.nightly  # ranks as threads: tests/backends/trencadis_gaudi/parallel/test_ranks.py
@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_checks_of_several_devices_hold_on_emulated_ones(mode, tmp_path):
    path = tmp_path / "report.json"
    assert main([*EMULATED, "--backend.gaudi.mode", mode, "--modes", mode, "--only", "ranks", "-o", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [(one["group"], one["name"], one["status"]) for one in report["checks"]] == [("cards", "ranks", "ok")]
