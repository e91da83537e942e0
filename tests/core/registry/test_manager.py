from __future__ import annotations

import types

import pytest

from trencadis.errors import PluginLoadError
from trencadis.hookspecs import hookimpl
from trencadis.registry.manager import PluginLoader


def _load(loader, entry_points):
    for entry_point, provenance in loader.candidates(entry_points):
        loader.load_entry_point(entry_point, provenance)


def _said(call, *arguments):
    with pytest.raises(PluginLoadError) as caught:
        call(*arguments)
    return str(caught.value)


def test_entry_points_are_loaded_by_name(install, plugin_source):
    later = install("a-package", "1.0", plugin_source("x"), name="zebra")
    first = install("b-package", "1.0", plugin_source("y"), name="ant")
    loader = PluginLoader()
    _load(loader, [*later, *first])
    assert list(loader.plugins) == ["ant", "zebra"]


def test_a_plugin_that_raises_at_import_is_named_with_version_cause_and_remedy(install):
    broken = install("bad-package", "1.5", "import no_such_module_anywhere")
    assert _said(_load, PluginLoader(), broken) == (
        'bad-package 1.5 (plugin "tiles") could not be imported: ModuleNotFoundError: No module named '
        "'no_such_module_anywhere'. Upgrade or uninstall bad-package, or block it: [plugins] blocked = [\"tiles\"]."
    )


def test_two_entry_points_of_one_name_are_told_apart_and_blocked_apart(install, plugin_source):
    both = install("a-package", "1.0", plugin_source("x")) + install("b-package", "1.0", plugin_source("y"))
    loader = PluginLoader()
    _load(loader, both)
    assert list(loader.plugins) == ["a-package:tiles", "b-package:tiles"]
    fewer = PluginLoader(blocked=["a-package:tiles"])
    _load(fewer, both)
    assert list(fewer.plugins) == ["b-package:tiles"]


def test_a_misspelt_hook_is_fatal_and_suggests(install):
    source = "from trencadis.hookspecs import hookimpl\n@hookimpl\ndef trencadis_bucketing(): return []\n"
    loader = PluginLoader()
    _load(loader, install("bad-package", "1.5", source))
    assert _said(loader.check_hooks, "tiles") == (
        'bad-package 1.5 (plugin "tiles") implements "trencadis_bucketing": no such hook. Did you mean "trencadis_bucketings"? '
        'Upgrade or uninstall bad-package, or block it: [plugins] blocked = ["tiles"].'
    )


def test_an_optional_hook_of_another_version_is_allowed():
    plugin = types.ModuleType("early")
    plugin.trencadis_future = hookimpl(optionalhook=True)(lambda: None)
    loader = PluginLoader()
    loader.load_object(plugin)
    loader.check_hooks("early")


def test_a_plugin_given_in_code_can_be_blocked(make_plugin):
    loader = PluginLoader(blocked=["mine"])
    assert loader.load_object(make_plugin("mine", bucketing=["x"])) == ""
    assert dict(loader.plugins) == {}


def test_the_same_plugin_twice_is_refused(make_plugin):
    loader = PluginLoader()
    plugin = make_plugin("mine", bucketing=["x"])
    loader.load_object(plugin)
    assert "could not be registered" in _said(loader.load_object, plugin)


def test_a_hook_can_be_called_for_one_plugin(make_plugin):
    loader = PluginLoader()
    loader.load_object(make_plugin("a", bucketing=["x"]))
    loader.load_object(make_plugin("b", bucketing=["y"]))
    (items,) = loader.hooks_of("b", "trencadis_bucketings")()
    assert [item.name for item in items] == ["y"]
    assert loader.has_hook("b", "trencadis_bucketings")
    assert not loader.has_hook("b", "trencadis_observers")
