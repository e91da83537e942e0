from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from trencadis.cli import main


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--prefill", "-1"], "no whole number from 0 to 64"),
        (["up", "--decode", "0"], "no whole number from 1 to 64"),
        (["up", "--port", "70000"], "no whole number from 1 to 65535"),
        (["up", "--server.port", "1"], "the cluster sets server.port itself"),
        (["around"], "invalid choice"),
        (["down", "--port", "65121"], "no cluster of this user runs at port 65121"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_help_explains_members_and_config_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--prefill N" in shown
    assert "go to every engine" in " ".join(shown.split())
