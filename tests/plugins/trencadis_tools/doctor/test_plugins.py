from __future__ import annotations

import importlib.metadata
import sys
import types
from importlib.metadata import Distribution

import pytest

from trencadis.api import PluginLoader
from trencadis.config.schema import PluginsConfig
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component
from trencadis_tools.doctor import plugins as section


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


def check_plugins(found, rules):
    return section.check_plugins(found, rules, PluginLoader.of_installed(rules.blocked))


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
    registry = check_plugins(found, PluginsConfig())
    assert told() == [("ok", "plugin house: observer one, observer two (no distribution)")]
    assert list(registry.components("observer")) == ["one", "two"]


def test_broken_plugin_is_doubtful_or_wrong_where_plugins_are_strict_and_the_others_are_loaded(found, told, installed):
    installed(plugin("house", "one"), broken("odd"), plugin("zoo", "two"))
    registry = check_plugins(found, PluginsConfig())
    assert [kind for kind, _ in told()] == ["ok", "warn", "ok"]
    assert 'plugin "odd"' in told()[1][1]
    check_plugins(found, PluginsConfig(strict=True))
    assert [kind for kind, _ in told()][3:] == ["ok", "fail", "ok"]
    assert list(registry.components("observer")) == ["one", "two"]


def test_a_name_that_two_plugins_offer_is_doubtful_and_left_out(found, told, installed):
    installed(plugin("house", "one", "two"), plugin("zoo", "one"))
    registry = check_plugins(found, PluginsConfig())
    assert [kind for kind, _ in told()] == ["ok", "ok", "warn"]
    assert 'Two plugins offer the observer component "one"' in told()[2][1]
    assert list(registry.components("observer")) == ["two"]


@pytest.mark.parametrize(("ours", "other"), [("house", "zoo"), ("zoo", "house")])
def test_of_a_built_in_plugin_and_one_with_its_name_the_other_is_to_be_blocked(found, told, installed_by, ours, other):
    installed_by({("trencadis", ours): plugin("built_in", "one", "two"), ("acme", other): plugin("stranger", "one")})
    check_plugins(found, PluginsConfig())
    assert [kind for kind, _ in told()] == ["ok", "ok", "warn"]
    assert [item.remedy for item in found][2] == (
        f'Upgrade or uninstall acme, or block it: [plugins] blocked = ["{other}"].'
    )


def test_remedy_blocks_one_of_two_plugins_that_are_called_alike(found, told, installed_by):
    installed_by({("trencadis", "zoo"): plugin("built_in", "one"), ("acme", "zoo"): broken("odd")})
    registry = check_plugins(found, PluginsConfig())
    assert [kind for kind, _ in told()] == ["ok", "warn"]
    assert [item.remedy for item in found][1].endswith('block it: [plugins] blocked = ["acme:zoo"].')
    assert list(registry.components("observer")) == ["one"]


def test_blocked_plugin_is_not_loaded_and_blocking_what_does_not_exist_is_doubtful(found, told, installed):
    installed(broken("odd"), plugin("house", "one"))
    check_plugins(found, PluginsConfig(blocked=("odd", "hose")))
    assert told() == [
        ("ok", "plugin house: observer one (no distribution)"),
        ("ok", "plugin odd: blocked"),
        ("warn", "blocked plugin hose: no plugin has that name"),
    ]


def test_no_plugin_at_all_is_wrong(found, told, installed):
    installed()
    assert dict(check_plugins(found, PluginsConfig()).plugins) == {}
    assert [kind for kind, _ in told()] == ["fail"]
