"""Environments that are there, are not, are of other versions, or cannot be made; nothing is installed from a registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers import environments
from peers.environments import ENVIRONMENTS, Environment, find, prepare


def test_each_environment_pins_what_it_is_about() -> None:
    for name, make in ENVIRONMENTS.items():
        packages = [package for step in make().steps for package in step if not package.startswith("-")]
        assert any("==" in package or "@" in package for package in packages), name


def test_one_that_was_never_made_says_what_to_do(tmp_path: Path) -> None:
    assert find("vllm", tmp_path).reason == "not prepared; run with --prepare"


def test_one_that_is_made_is_found_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(environments, "_python", lambda wanted, directory, options: made.append(directory) or "")
    assert prepare("gguf", tmp_path).reason == prepare("gguf", tmp_path).reason == find("gguf", tmp_path).reason == ""
    assert made == [tmp_path / "environments" / "gguf"]


def test_one_that_cannot_be_made_says_why_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "odd", lambda: Environment(steps=[], check="import no_such_module"))
    assert "ModuleNotFoundError: No module named 'no_such_module'" in prepare("odd", tmp_path).reason
    assert "no_such_module" in find("odd", tmp_path).reason
    monkeypatch.setitem(ENVIRONMENTS, "odd", lambda: Environment(steps=[], check="import json"))
    prepared = prepare("odd", tmp_path)
    assert prepared.reason == ""
    assert prepared.python.exists()


def test_one_of_other_versions_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_python", lambda wanted, directory, options: "")
    prepare("gguf", tmp_path)
    monkeypatch.setitem(ENVIRONMENTS, "gguf", lambda: Environment(steps=[["gguf==0"]], check="import gguf"))
    assert find("gguf", tmp_path).reason == "prepared with other versions; run with --prepare"
