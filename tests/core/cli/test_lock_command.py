"""`trencadis lock` writes and compares, and `--locked` refuses a start before anything of it happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.cli import main


@pytest.fixture(autouse=True)
def folder(installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_written_lock_is_the_same_the_second_time_and_lets_the_same_plan_pass(folder: Path, capsys) -> None:
    assert main(["lock", "--scheduling.name", "other"]) == 0
    assert capsys.readouterr().out.startswith("trencadis.lock: 4 plugins, ")
    first = (folder / "trencadis.lock").read_bytes()
    assert main(["lock", "--scheduling.name", "other", "--out", "again.lock"]) == 0
    assert (folder / "again.lock").read_bytes() == first
    assert main(["lock", "--check", "--scheduling.name", "other"]) == 0
    assert main(["plugins", "--locked", "--scheduling.name", "other"]) == 0
    assert main(["plugins", "--scheduling.name", "other", "--locked=again.lock"]) == 0


def test_check_lists_what_differs_and_ends_with_1(folder: Path, capsys) -> None:
    assert main(["lock"]) == 0
    written = (folder / "trencadis.lock").read_bytes()
    capsys.readouterr()
    assert main(["lock", "--check", "--engine.seed", "3", "--eviction.fallback="]) == 1
    assert capsys.readouterr().out.splitlines() == [
        'eviction.fallback is absent, locked "lru" of the plugin "house"',
        "engine.seed is 3 (from flag --engine.seed), locked 0",
    ]
    assert (folder / "trencadis.lock").read_bytes() == written


@pytest.mark.parametrize("arguments", [["generate", "--locked", "a prompt"], ["plugins", "--locked"]])
def test_a_locked_command_refuses_another_plan_and_does_nothing(arguments, capsys, monkeypatch) -> None:
    assert main(["lock"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--scheduling.name", "other"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[:2] == [
        "error: trencadis.lock locks another plan than this one:",
        '  scheduling.name is "other" of the plugin "house" (from flag --scheduling.name), locked "fair_share" of the plugin "house"',
    ]


def test_the_word_after_locked_is_a_word_of_the_command(capsys) -> None:
    assert main(["generate", "--locked", "other.lock"]) == 2
    assert "lock file trencadis.lock: No such file or directory." in capsys.readouterr().err
    assert main(["lock", "--locked", "other.lock"]) == 2
    assert "unknown argument other.lock" in capsys.readouterr().err


def test_help_of_commands_that_resolve_a_plan_shows_the_flag_and_of_others_does_not(capsys) -> None:
    main(["generate", "--help"])
    assert "--locked" in capsys.readouterr().out
    for other in ("doctor", "compare"):
        main([other, "--help"])
        assert "--locked" not in capsys.readouterr().out


def test_a_hub_id_without_a_commit_is_warned_about(capsys) -> None:
    assert main(["lock", "--model.path", "some/model"]) == 0
    assert "set model.revision to a commit" in capsys.readouterr().err
    assert main(["lock", "--model.path", "some/model", "--model.revision", "0" * 40]) == 0
    assert "commit" not in capsys.readouterr().err
