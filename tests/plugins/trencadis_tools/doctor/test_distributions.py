from __future__ import annotations

import json
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from trencadis_tools.doctor.distributions import check_distributions

PROJECT = '[project]\nname = "{name}"\n[project.entry-points.trencadis]\n{points}\n'


def install(site: Path, name: str, *, points: str = "one = 'pkg'", editable: Path | None = None) -> Distribution:
    """Lay out what pip does, and return it as importlib.metadata finds it."""
    info = site / f"{name.replace('-', '_')}-0.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.2.0\n")
    (info / "entry_points.txt").write_text("[trencadis]\n" + points.replace("'", "") + "\n" if points else "")
    if editable is not None:
        origin = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(origin))
    return Distribution.at(info)


def test_a_distribution_with_plugins_and_ours_are_counted_each_once_and_others_left_out(found, told, tmp_path):
    plugin = install(tmp_path, "fibonacci-buckets")
    ours, other = install(tmp_path, "trencadis", points=""), install(tmp_path, "requests", points="")
    check_distributions(found, [plugin, plugin, ours, other])
    assert told() == [("ok", "fibonacci-buckets 0.2.0, 1 plugins"), ("ok", "trencadis 0.2.0, 0 plugins")]


def test_distribution_in_two_places_is_wrong_and_both_are_named(found, tmp_path):
    copies = [install(tmp_path / place, "Fibonacci_Buckets") for place in ("here", "there")]
    check_distributions(found, copies)
    (item,) = found
    assert item.severity.value == "fail"
    assert str(tmp_path / "here") in item.message
    assert str(tmp_path / "there") in item.message
    assert "pip uninstall" in item.remedy


@pytest.mark.parametrize("name", ["home", "a folder with spaces"])
def test_editable_distribution_names_its_folder_and_is_doubtful_if_it_has_changed_since(found, tmp_path, name):
    home = tmp_path / name
    home.mkdir()
    installed = install(tmp_path / "site", "fib", points="one = 'pkg'\nold = 'pkg'", editable=home)
    for points in ("one = 'pkg'\nold = 'pkg'", "one = 'pkg.moved'\ntwo = 'pkg'"):
        (home / "pyproject.toml").write_text(PROJECT.format(name="fib", points=points))
        check_distributions(found, [installed])
    same, changed = found
    assert (same.severity.value, same.message) == ("ok", f"fib 0.2.0, 2 plugins, editable from {home}")
    assert changed.severity.value == "warn"
    assert changed.message.endswith("than what is installed: old, one, two")
    assert changed.remedy.startswith("Run pip install -e ")


def test_editable_distribution_that_was_moved_away_is_wrong(found, tmp_path):
    check_distributions(found, [install(tmp_path / "site", "fib", editable=tmp_path / "gone")])
    (item,) = found
    assert item.severity.value == "fail"
    assert "no pyproject.toml any more" in item.message
