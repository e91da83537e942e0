"""Nouns that plugins add: their table, their components, their place in the plan."""

from __future__ import annotations

import types
from typing import Any

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.config import load_config
from trencadis.config.dump import dump_config
from trencadis.errors import ComponentConflictError, ContractError, PluginLoadError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, Noun, setting
from trencadis.registry import Registry, resolve_plan

CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)
INTERFACE_VERSION = 1
STABILITY = "provisional"


class Tracer:
    """Contract of the noun."""


@attrs.frozen(kw_only=True)
class FileConfig:
    path: str = setting("trace.json", "Where to.")


TRACER = Noun(name="tracer", hook="trencadis_tracers", contract=Tracer, default="file", helps="speculation")


def offering(*nouns: Any) -> types.ModuleType:
    plugin = types.ModuleType("tracers")
    plugin.nouns = hookimpl(specname="trencadis_nouns")(lambda: nouns)  # type: ignore[attr-defined]
    return plugin


def components(made: Any = Tracer, *, version: int = 1) -> types.ModuleType:
    plugin = types.ModuleType("of_others")
    one = Component(
        name="file", factory=lambda *_: made(), config=FileConfig, summary="To a file.", interface_version=version
    )
    plugin.tracers = hookimpl(specname="trencadis_tracers")(lambda: [one])  # type: ignore[attr-defined]
    return plugin


def registry_of(*plugins: Any, house: Any = ()) -> Registry:
    return Registry.discover(entry_points=(), extra_plugins=[*house, *plugins])


def test_a_noun_has_a_table_and_its_components_have_theirs(house: Any) -> None:
    registry = registry_of(offering(TRACER), components(), house=[house])
    assert list(registry.nouns)[list(registry.nouns).index("speculation") + 1] == "tracer"
    resolved = load_config(settings=registry.settings, environ={}, flags=["--tracer.file.path=x"])
    assert resolved.config.noun("tracer").name == "file"
    assert resolved.config.noun("tracer").components == {"file": FileConfig(path="x")}
    again = load_config(settings=registry.settings, environ={}, overrides=dump_config(resolved.config, secrets=False))
    assert again.config == resolved.config


def test_its_component_is_chosen_where_the_noun_that_it_helps_has_one(house: Any, make_plugin: Any) -> None:
    drafts = make_plugin("drafts", speculation=["ngram"])
    registry = registry_of(offering(TRACER), components(), house=[house, drafts])

    def chosen(**overrides: str) -> set[str]:
        config = load_config(settings=registry.settings, environ={}, overrides=overrides).config
        return {noun for noun in resolve_plan(config, registry).choices if noun == "tracer"}

    assert chosen() == set()
    assert chosen(**{"speculation.name": "ngram"}) == {"tracer"}
    made = registry.build(registry.select("tracer", "file"), FileConfig(), CONTEXT)
    assert isinstance(made, Tracer)


def test_what_is_not_of_the_contract_is_refused() -> None:
    registry = registry_of(offering(TRACER), components(str))
    with pytest.raises(ContractError, match="built a str, which is no Tracer"):
        registry.build(registry.select("tracer", "file"), FileConfig(), CONTEXT)
    with pytest.raises(PluginLoadError, match="version 2 of the tracer interface"):
        registry_of(offering(TRACER), components(version=2))


def test_without_the_noun_its_hook_does_not_exist() -> None:
    with pytest.raises(PluginLoadError, match='implements "trencadis_tracers": no such hook'):
        registry_of(components())


@pytest.mark.parametrize(
    ("offered", "error", "said"),
    [
        ((object(),), ContractError, "where a trencadis.interfaces.Noun is expected"),
        ((attrs.evolve(TRACER, name="engine"),), ContractError, "the name is one of trencadis itself"),
    ],
)
def test_what_is_no_noun_is_refused(offered: tuple[Any, ...], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        registry_of(offering(*offered))


def test_two_plugins_cannot_offer_one_noun() -> None:
    other = offering(TRACER)
    other.__name__ = "others"
    with pytest.raises(ComponentConflictError, match="Two plugins offer the noun tracer"):
        registry_of(offering(TRACER), other)


def test_a_name_that_cannot_be_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="lower-case"):
        attrs.evolve(TRACER, name="My-Noun")
