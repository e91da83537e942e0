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


def test_plugin_in_one_place_is_sound(found, told, tmp_path):
    check_distributions(found, [install(tmp_path, "fibonacci-buckets")])
    assert told() == [("ok", "fibonacci-buckets 0.2.0, 1 plugins")]


def test_distribution_without_a_plugin_is_none_of_our_business(found, told, tmp_path):
    check_distributions(found, [install(tmp_path, "requests", points="")])
    assert told() == []


def test_ours_is_looked_at_even_without_entry_points(found, told, tmp_path):
    check_distributions(found, [install(tmp_path, "trencadis", points="")])
    assert told() == [("ok", "trencadis 0.2.0, 0 plugins")]


def test_distribution_in_two_places_is_wrong_and_both_are_named(found, tmp_path):
    copies = [install(tmp_path / place, "Fibonacci_Buckets") for place in ("here", "there")]
    check_distributions(found, copies)
    (item,) = found
    assert item.severity.value == "fail"
    assert str(tmp_path / "here") in item.message
    assert str(tmp_path / "there") in item.message
    assert "pip uninstall" in item.remedy


def test_same_place_seen_twice_is_one_distribution(found, told, tmp_path):
    item = install(tmp_path, "fibonacci-buckets")
    check_distributions(found, [item, item])
    assert [kind for kind, _ in told()] == ["ok"]


@pytest.mark.parametrize("name", ["home", "a folder with spaces"])
def test_editable_distribution_names_its_folder(found, told, tmp_path, name):
    home = tmp_path / name
    home.mkdir()
    (home / "pyproject.toml").write_text(PROJECT.format(name="fib", points="one = 'pkg'"))
    check_distributions(found, [install(tmp_path / "site", "fib", editable=home)])
    assert told() == [("ok", f"fib 0.2.0, 1 plugins, editable from {home}")]


def test_editable_distribution_whose_entry_points_changed_since_is_doubtful(found, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "pyproject.toml").write_text(PROJECT.format(name="fib", points="one = 'pkg.moved'\ntwo = 'pkg'"))
    check_distributions(found, [install(tmp_path / "site", "fib", points="one = 'pkg'\nold = 'pkg'", editable=home)])
    (item,) = found
    assert item.severity.value == "warn"
    assert item.message.endswith("than what is installed: old, one, two")
    assert item.remedy == f"Run pip install -e {home} again."


def test_editable_distribution_that_was_moved_away_is_wrong(found, tmp_path):
    check_distributions(found, [install(tmp_path / "site", "fib", editable=tmp_path / "gone")])
    (item,) = found
    assert item.severity.value == "fail"
    assert "no pyproject.toml any more" in item.message
