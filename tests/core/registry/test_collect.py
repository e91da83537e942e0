from __future__ import annotations

import attrs
import pytest

from trencadis.errors import ComponentConflictError, ContractError, PluginLoadError
from trencadis.interfaces import bucketing
from trencadis.registry import Registry


def _said(error_type, **arguments):
    with pytest.raises(error_type) as caught:
        Registry.discover(**({"entry_points": (), "strict": True} | arguments))
    return str(caught.value)


def test_a_component_keeps_its_provenance(install, plugin_source):
    registry = Registry.discover(entry_points=install("fibonacci-tiles", "0.2.0", plugin_source("fibonacci")))
    found = registry.components("bucketing")["fibonacci"]
    assert (found.noun, found.name, found.provenance.version) == ("bucketing", "fibonacci", "0.2.0")
    assert str(found) == 'bucketing component "fibonacci" of fibonacci-tiles 0.2.0 (plugin "tiles")'


def test_two_packages_with_one_name_are_both_named(install, plugin_source):
    first = install("a-package", "1.0", plugin_source("fibonacci"), name="a")
    second = install("b-package", "2.0", plugin_source("fibonacci"), name="b")
    assert _said(ComponentConflictError, entry_points=[*first, *second]) == (
        'Two plugins offer the bucketing component "fibonacci": a-package 1.0 (plugin "a") and b-package 2.0 (plugin "b"). '
        'Uninstall one of them, or block one: [plugins] blocked = ["b"].'
    )


@pytest.mark.parametrize(("ours", "other"), [("a", "b"), ("b", "a")])
def test_of_a_stranger_and_a_built_in_plugin_the_stranger_is_to_be_blocked(install, plugin_source, ours, other):
    built_in = install("trencadis", "1.0", plugin_source("fibonacci"), name=ours, module="built_in_tiles")
    stranger = install("b-package", "2.0", plugin_source("fibonacci"), name=other)
    assert _said(ComponentConflictError, entry_points=[*built_in, *stranger]).endswith(
        f'Upgrade or uninstall b-package, or block it: [plugins] blocked = ["{other}"].'
    )


def test_one_plugin_that_yields_a_name_twice_is_told_so(make_plugin):
    assert _said(ContractError, extra_plugins=[make_plugin(eviction=["x", "x"])]) == (
        'test_plugin, given in code (plugin "test_plugin") yielded the eviction component "x" twice. '
        "Correct it, or do not pass it."
    )


def test_a_conflict_ends_when_one_side_is_blocked(install, plugin_source):
    first = install("a-package", "1.0", plugin_source("fibonacci"), name="a")
    second = install("b-package", "2.0", plugin_source("fibonacci"), name="b")
    registry = Registry.discover(entry_points=[*first, *second], blocked=["b"])
    assert registry.components("bucketing")["fibonacci"].provenance.distribution == "a-package"


def test_a_register_hook_that_raises_names_plugin_and_hook(install):
    source = (
        "from trencadis.hookspecs import hookimpl\n@hookimpl\ndef trencadis_bucketings():\n    yield from [1 / 0]\n"
    )
    assert _said(PluginLoadError, entry_points=install("bad-package", "1.5", source)) == (
        'bad-package 1.5 (plugin "tiles") raised in trencadis_bucketings: ZeroDivisionError: division by zero. '
        'Upgrade or uninstall bad-package, or block it: [plugins] blocked = ["tiles"].'
    )


@pytest.mark.parametrize(("version", "accepted"), [(1, False), (2, False), (3, True), (4, False)])
def test_a_component_for_another_version_of_its_contract_is_refused(
    monkeypatch, make_plugin, component, version, accepted
):
    monkeypatch.setattr(bucketing, "INTERFACE_VERSION", 3)
    plugin = make_plugin(bucketing=[component("x", interface_version=version)])
    if accepted:
        assert "x" in Registry.discover(entry_points=(), extra_plugins=[plugin]).components("bucketing")
    else:
        said = _said(PluginLoadError, extra_plugins=[plugin])
        assert said.startswith(
            'bucketing component "x" of test_plugin, given in code (plugin "test_plugin") is refused: '
        )
        assert f"written for version {version}" in said


@pytest.mark.parametrize("name", ["auto", "none", "options", "name", "fallback", "components"])
def test_a_name_that_means_something_else_in_the_table_is_refused(make_plugin, name):
    assert "the name is reserved" in _said(ContractError, extra_plugins=[make_plugin(bucketing=[name])])


def test_a_config_that_is_no_attrs_class_is_refused(make_plugin, component):
    plugin = make_plugin(bucketing=[component("x", config=dict)])
    assert "is no attrs class" in _said(ContractError, extra_plugins=[plugin])


def test_a_config_whose_types_cannot_be_found_is_refused(make_plugin, component):
    @attrs.frozen
    class Lost:
        where: NoSuchType = None  # type: ignore[name-defined]  # noqa: F821

    said = _said(ContractError, extra_plugins=[make_plugin(bucketing=[component("x", config=Lost)])])
    assert "the fields of" in said
    assert "NoSuchType" in said


def test_a_default_that_cannot_be_used_names_package_component_and_field(make_plugin, component):
    @attrs.frozen
    class Bad:
        size: int = attrs.field(default=-1, validator=attrs.validators.ge(0))

    assert _said(PluginLoadError, extra_plugins=[make_plugin(eviction=[component("bad", config=Bad)])]) == (
        'eviction component "bad" of test_plugin, given in code (plugin "test_plugin"): '
        "[eviction.bad] size = -1 (the default): must be >= 0. Correct it, or do not pass it."
    )
