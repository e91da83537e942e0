"""Installed plugins that cannot be used: left out, listed, and refused only where something of them is asked for."""

from __future__ import annotations

import logging

import pytest

from trencadis.errors import ComponentConflictError, PluginError, UnknownComponentError, UnknownKeyError
from trencadis.registry import Registry, load_with_plugins

HEAD = "from trencadis.hookspecs import hookimpl\nfrom trencadis.interfaces import Component\nimport attrs\n"
COMPONENT = 'Component(name="spiral", factory=lambda config, context: None, summary="Of a test.", interface_version=1)'


def hook(body: str, name: str = "trencadis_bucketings()") -> str:
    return f"{HEAD}@hookimpl\ndef {name}:\n    {body}\n"


BROKEN = {
    "raises at import": "1 / 0",
    "exits at import": "raise SystemExit(3)",
    "is no Python": "def (:",
    "is of another Python": "match = = 1",
    "misses a dependency": "import no_such_module_anywhere",
    "misses a name": "from trencadis.interfaces import NoSuchContract",
    "recurses at import": "def f(): f()\nf()",
    "raises an exception of its own at import": "class Odd(Exception):\n    pass\nraise Odd",
    "raises in a hook": hook("raise OSError('no licence')"),
    "exits in a hook": hook("raise SystemExit(3)"),
    "raises after its first component": hook(f"yield {COMPONENT}; raise OSError('later')"),
    "yields no component": hook("return ['spiral']"),
    "returns a number": hook("return 3"),
    "misspells a hook": hook("return []", "trencadis_bucketing()"),
    "asks for an unknown argument": hook("return []", "trencadis_bucketings(colour)"),
    "forgets the marker": HEAD + "def trencadis_bucketings():\n    return []\n",
    "is of a later interface": hook("yield " + COMPONENT.replace("version=1", "version=99")),
    "is of no interface version": hook("yield " + COMPONENT.replace("version=1", "version='new'")),
    "takes a reserved name": hook("yield " + COMPONENT.replace("spiral", "auto")),
    "yields a name twice": hook(f"yield {COMPONENT}; yield {COMPONENT}"),
    "has no attrs class as its config": hook("yield " + COMPONENT.replace("factory", "config=dict, factory")),
    "has a default that its own validator refuses": HEAD
    + "@attrs.frozen\nclass C:\n    size: int = attrs.field(default=-1, validator=attrs.validators.ge(0))\n"
    + hook("yield " + COMPONENT.replace("factory", "config=C, factory")).removeprefix(HEAD),
}


@pytest.fixture(params=BROKEN)
def broken(request, install):
    """The entry point of a distribution that cannot be used, one after the other."""
    return install("bad-package", "1.5", BROKEN[request.param], name="bad")


def test_a_broken_distribution_is_left_out_and_listed_with_its_reason(broken, house):
    registry = Registry.discover(entry_points=broken, extra_plugins=[house])
    assert list(registry.plugins) == ["house"]
    assert "spiral" not in registry.components("bucketing")
    assert list(registry.broken) == ["bad"]
    said = str(registry.broken["bad"].error)
    assert "bad-package 1.5" in said
    assert (
        said.endswith('Upgrade or uninstall bad-package, or block it: [plugins] blocked = ["bad"].')
        or "not allowed" in said.lower()
    )


def test_a_broken_distribution_ends_the_start_if_plugins_are_strict(broken, house):
    with pytest.raises(PluginError, match=r"bad-package 1\.5"):
        load_with_plugins(environ={}, flags=["--plugins.strict"], entry_points=broken, extra_plugins=[house])


def test_what_a_broken_distribution_may_offer_is_refused_with_its_reason(broken, house):
    registry = Registry.discover(entry_points=broken, extra_plugins=[house])
    with pytest.raises(UnknownComponentError, match=r"(?s)no such component.*cannot be used: .*bad-package 1\.5"):
        registry.select("bucketing", "spiral")
    with pytest.raises(UnknownKeyError, match=r"(?s)cannot be used: .*bad-package 1\.5"):
        load_with_plugins(
            environ={}, overrides={"bucketing": {"spiral": {"limit": 3}}}, entry_points=broken, extra_plugins=[house]
        )


def test_no_hook_of_a_broken_plugin_is_called(install, house):
    source = hook("raise OSError('no licence')") + "@hookimpl\ndef trencadis_select_backend():\n    return 'bad'\n"
    registry = Registry.discover(entry_points=install("bad-package", "1.5", source), extra_plugins=[house])
    assert registry.hooks.select_backend("torch", lambda: registry.components("backend")) == "torch"


def test_a_broken_plugin_is_warned_of_once_with_its_reason(install, house, caplog):
    registry = Registry.discover(entry_points=install("bad-package", "1.5", "1 / 0"), extra_plugins=[house])
    with caplog.at_level(logging.WARNING):
        registry.left_out.warn()
    (record,) = caplog.records
    assert "bad-package 1.5" in record.getMessage()
    assert "ZeroDivisionError" in record.getMessage()


def test_a_misspelt_key_of_no_component_is_not_put_down_to_a_broken_plugin(install, house):
    with pytest.raises(UnknownKeyError) as caught:
        load_with_plugins(
            environ={},
            overrides={"log": {"levl": "info"}},
            entry_points=install("bad-package", "1.5", "1 / 0"),
            extra_plugins=[house],
        )
    assert "bad-package" not in str(caught.value)


def test_a_name_that_two_packages_offer_is_refused_where_it_is_asked_for_and_nowhere_else(
    install, plugin_source, house
):
    points = [
        *install("a-package", "1.0", plugin_source("spiral"), name="a"),
        *install("b-package", "2.0", plugin_source("spiral"), name="b"),
        *install("c-package", "3.0", plugin_source("spiral"), name="c"),
        *install("d-package", "4.0", plugin_source("helix"), name="d"),
    ]
    registry = Registry.discover(entry_points=points, extra_plugins=[house])
    assert set(registry.components("bucketing")) == {"exact", "exponential", "helix"}
    assert registry.broken == {}
    with pytest.raises(ComponentConflictError, match=r"a-package 1\.0.*b-package 2\.0"):
        registry.select("bucketing", "spiral")
    assert registry.select("bucketing", "helix").name == "helix"
    with pytest.raises(ComponentConflictError):
        Registry.discover(entry_points=points, strict=True)
