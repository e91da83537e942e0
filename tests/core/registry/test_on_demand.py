"""Plugins whose entry points say that they are there on demand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from trencadis.errors import PluginLoadError, UnknownComponentError, UnknownKeyError
from trencadis.registry import Registry, load_with_plugins
from trencadis.registry.manager import PluginLoader

SOURCE = """
import attrs
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command, Component, ConfigTable, setting

@attrs.frozen(kw_only=True)
class Options:
    size: int = setting(3, "A size.")

@hookimpl
def trencadis_bucketings():
    yield Component(name="tiles", factory=lambda *_: None, config=Options, summary="Of a package.", interface_version=1)

@hookimpl
def trencadis_tables():
    yield ConfigTable(name="tiling", config=Options)

@hookimpl
def trencadis_commands():
    yield Command(name="tile", summary="Tiles.", load=lambda: None)
"""


@pytest.fixture
def points(install: Callable[..., list[EntryPoint]]) -> list[EntryPoint]:
    """Of a plugin that is there on demand; its module is imported with it."""
    (point,) = install("tile-works", "1.0", SOURCE)
    return [EntryPoint(point.name, f"{point.value} [on_demand]", point.group)._for(point.dist)]


def is_imported() -> bool:
    return "tile_works" in sys.modules


def never(_: str) -> bool:
    return False


@pytest.fixture
def registry(points: list[EntryPoint]) -> Registry:
    return Registry.discover(entry_points=points, mentions=never)


def test_it_is_not_imported_and_the_rest_of_the_registry_is_there(registry: Registry) -> None:
    assert not registry.settings.get("bucketing.tiles.size")
    assert registry.given_in_code == []
    assert registry.hooks.select_backend("torch", lambda: registry.components("backend")) == "torch"
    registry.left_out.warn()
    assert not is_imported()


@pytest.mark.parametrize(
    "ask",
    [
        lambda registry: "tiles" in registry.components("bucketing"),
        lambda registry: registry.offers("bucketing", "tiles"),
        lambda registry: registry.select("bucketing", "tiles").name == "tiles",
        lambda registry: list(registry.plugins) == ["tiles"],
        lambda registry: registry.broken == {},
        lambda registry: registry.contested == {},
        lambda registry: registry.complete() and not registry.complete(),
    ],
    ids=["components", "offers", "select", "plugins", "broken", "contested", "complete"],
)
def test_whatever_lists_all_or_asks_for_it_imports_it(ask: Callable[[Registry], bool], registry: Registry) -> None:
    assert ask(registry)
    assert is_imported()
    assert registry.settings.get("bucketing.tiles.size")


def test_a_name_that_nobody_has_is_refused_with_those_of_all(registry: Registry) -> None:
    with pytest.raises(UnknownComponentError, match='Did you mean "tiles"'):
        registry.select("bucketing", "tilse")


def test_its_name_is_asked_for(points: list[EntryPoint]) -> None:
    asked: list[str] = []
    PluginLoader.of_installed(entry_points=points, mentions=asked.append)  # type: ignore[arg-type] # None is no
    assert asked == ["tiles"]
    assert not is_imported()
    PluginLoader.of_installed(entry_points=points, mentions=lambda name: name == "tiles")
    assert is_imported()


def load(points: list[EntryPoint], **overrides: Any) -> Any:
    return load_with_plugins(entry_points=points, environ={}, overrides=overrides)[0].config


def test_a_configuration_that_does_not_name_it_does_without(points: list[EntryPoint]) -> None:
    load(points, engine={"seed": 3})
    assert not is_imported()


def test_a_configuration_that_names_it_has_its_tables(points: list[EntryPoint]) -> None:
    assert load(points, bucketing={"tiles": {"size": 5}}).bucketing.components["tiles"].size == 5
    assert is_imported()


def test_a_table_of_it_that_has_another_name_is_found_at_the_second_look(points: list[EntryPoint]) -> None:
    (table,) = load(points, tiling={"size": 7}).tables.values()
    assert table.size == 7


@pytest.fixture
def broken(install: Callable[..., list[EntryPoint]]) -> list[EntryPoint]:
    (point,) = install("tile-works", "1.0", "raise RuntimeError('no clay')")
    return [EntryPoint(point.name, f"{point.value} [on_demand]", point.group)._for(point.dist)]


def test_a_broken_one_is_named_where_it_is_missed(broken: list[EntryPoint]) -> None:
    load(broken, engine={"seed": 3})
    with pytest.raises(UnknownKeyError, match="no clay"):
        load(broken, bucketing={"tlies": {"size": 5}})
    registry = Registry.discover(entry_points=broken, mentions=never)
    assert "no clay" in str(registry.broken["tiles"].error)


def test_a_broken_one_is_fatal_where_that_is_asked_for(broken: list[EntryPoint]) -> None:
    registry = Registry.discover(entry_points=broken, mentions=never, strict=True)
    with pytest.raises(PluginLoadError, match="no clay"):
        registry.complete()
