from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trencadis.saved_help import keep, saved


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with a module of a plugin, imported."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "plugin_of_help.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))  # sys.path[0] is the command's own folder, and does not count
    monkeypatch.setattr(sys, "path", [sys.path[0], str(folder), *sys.path[1:]])
    monkeypatch.delitem(sys.modules, "plugin_of_help", raising=False)
    __import__("plugin_of_help")
    return folder


def test_what_is_kept_is_said_again(environ: dict[str, str], plugin: Path) -> None:
    assert saved(environ) == ""
    keep("usage", environ)
    assert saved(environ) == "usage"


def test_another_width_is_another_text(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    keep("narrow", environ)
    monkeypatch.setenv("COLUMNS", "81")
    assert saved(environ) == ""


def test_a_changed_plugin_makes_another_text(environ: dict[str, str], plugin: Path) -> None:
    keep("usage", environ)
    (plugin / "plugin_of_help.py").write_text("# changed")
    assert saved(environ) == ""


def test_an_installed_package_makes_another_text(environ: dict[str, str], plugin: Path) -> None:
    keep("usage", environ)
    before = plugin.stat()
    (plugin / "another.py").write_text("")
    os.utime(plugin, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert saved(environ) == ""


def test_variables_of_ours_may_block_plugins(environ: dict[str, str]) -> None:
    keep("usage", environ)
    blocking = {**environ, "TRENCADIS_BLOCKED_PLUGINS": "torch"}
    assert saved(blocking) == ""
    keep("without torch", blocking)
    assert saved(environ) == "usage"


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"text": "x"}'])
def test_a_damaged_file_is_no_text(environ: dict[str, str], content: str) -> None:
    keep("usage", environ)
    (file,) = Path(environ["XDG_CACHE_HOME"]).rglob("*.json")
    file.write_text(content)
    assert saved(environ) == ""


def test_where_nothing_can_be_kept_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    keep("usage", environ)
    assert saved(environ) == ""
