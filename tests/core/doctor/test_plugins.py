from __future__ import annotations

import types

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
