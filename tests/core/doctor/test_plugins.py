from __future__ import annotations

import importlib.metadata
import sys
import types
from importlib.metadata import Distribution

import pytest

from trencadis.doctor.plugins import check_plugins
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component


def plugin(name, *components):
    module = types.ModuleType(name)
    items = [
        Component(name=item, factory=lambda config, context: None, summary="Does.", interface_version=1)
        for item in components
    ]
    module.trencadis_observers = hookimpl(lambda: items, specname="trencadis_observers")
    return module


def broken(name):
    module = types.ModuleType(name)
    module.trencadis_observers = lambda: ()  # without the marker it would never be called
    return module


@pytest.fixture
def installed_by(tmp_path, monkeypatch):
    """Returns a function: make modules the only plugins; each is given by its distribution and the name of its entry point."""

    def install(modules):
        points = []
        for (distribution, name), module in modules.items():
            info = tmp_path / f"{distribution}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[trencadis]\n{name} = {module.__name__}\n")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            points += Distribution.at(info).entry_points
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: points)

    return install


def test_every_plugin_says_what_it_offers(found, told, installed):
    installed(plugin("house", "one", "two"))
    registry = check_plugins(found, ())
    assert told() == [("ok", "plugin house: observer one, observer two (no distribution)")]
    assert list(registry.components("observer")) == ["one", "two"]


def test_broken_plugin_is_named_and_the_others_are_loaded(found, told, installed):
    installed(plugin("house", "one"), broken("odd"), plugin("zoo", "two"))
    registry = check_plugins(found, ())
    assert [kind for kind, _ in told()] == ["ok", "fail", "ok"]
    assert 'plugin "odd"' in told()[1][1]
    assert list(registry.components("observer")) == ["one", "two"]


def test_of_two_plugins_with_one_name_the_second_is_wrong_and_the_first_is_loaded(found, told, installed):
    installed(plugin("house", "one"), plugin("zoo", "one"))
    registry = check_plugins(found, ())
    assert [kind for kind, _ in told()] == ["ok", "fail"]
    assert 'Two plugins offer the observer component "one"' in told()[1][1]
    assert registry.components("observer")["one"].provenance.plugin == "house"


@pytest.mark.parametrize(("ours", "other"), [("house", "zoo"), ("zoo", "house")])
def test_of_a_built_in_plugin_and_one_with_its_name_the_other_is_wrong(found, told, installed_by, ours, other):
    installed_by({("trencadis", ours): plugin("built_in", "one", "two"), ("acme", other): plugin("stranger", "one")})
    registry = check_plugins(found, ())
    assert [kind for kind, _ in told()] == ["ok", "fail"]
    assert [item.remedy for item in found][1] == (
        f'Upgrade or uninstall acme, or block it: [plugins] blocked = ["{other}"].'
    )
    assert list(registry.plugins) == [ours]


def test_remedy_blocks_one_of_two_plugins_that_are_called_alike(found, told, installed_by):
    installed_by({("trencadis", "zoo"): plugin("built_in", "one"), ("acme", "zoo"): broken("odd")})
    registry = check_plugins(found, ())
    assert [kind for kind, _ in told()] == ["ok", "fail"]
    assert [item.remedy for item in found][1].endswith('block it: [plugins] blocked = ["acme:zoo"].')
    assert list(registry.components("observer")) == ["one"]


def test_blocked_plugin_is_not_loaded(found, told, installed):
    installed(broken("odd"), plugin("house", "one"))
    check_plugins(found, ["odd"])
    assert told() == [("ok", "plugin house: observer one (no distribution)"), ("ok", "plugin odd: blocked")]


def test_blocking_what_does_not_exist_is_doubtful(found, told, installed):
    installed(plugin("house", "one"))
    check_plugins(found, ["hose"])
    assert told()[-1] == ("warn", "blocked plugin hose: no plugin has that name")


def test_no_plugin_at_all_is_wrong(found, told, installed):
    installed()
    assert dict(check_plugins(found, ()).plugins) == {}
    assert [kind for kind, _ in told()] == ["fail"]
