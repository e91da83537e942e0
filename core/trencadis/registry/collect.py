"""Components out of register hooks: checked, each with its provenance, one per name."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, TypeVar

import attrs

from trencadis.config import check_defaults, settings_of_table
from trencadis.config.schema import HERE, Config
from trencadis.errors import ComponentConflictError, ConfigError, ContractError, PluginError, PluginLoadError
from trencadis.faults import as_words, shown
from trencadis.interfaces.component import Component
from trencadis.interfaces.config_table import ConfigTable
from trencadis.interfaces.health_check import HealthCheck
from trencadis.interfaces.noun import Noun
from trencadis.interfaces.placement import Placement
from trencadis.registry.contracts import why_refused
from trencadis.registry.manager import PluginLoader
from trencadis.registry.provenance import OUR_DISTRIBUTION, Provenance

__all__ = [
    "NOUNS_HOOK",
    "BrokenPlugin",
    "RegisteredComponent",
    "add_component",
    "checks_of",
    "components_of",
    "nouns_of",
    "placements_of",
    "tables_of",
]

K = TypeVar("K", bound=Hashable)
ItemT = TypeVar("ItemT")

_RESERVED = frozenset({"auto", "components", "none", "options"})
NOUNS_HOOK = "trencadis_nouns"
_CORE_TABLES = frozenset(field.name for field in attrs.fields(Config))


@attrs.frozen(kw_only=True)
class RegisteredComponent:
    """A component and where it comes from.

    Attributes:
        noun: Such as ``bucketing``.
        name: Name in the config: the component's name, or its import path.
        component: Component that the plugin yielded.
        provenance: Which plugin did.
    """

    noun: str
    name: str
    component: Component
    provenance: Provenance

    def __str__(self) -> str:
        """Return ``bucketing component "fibonacci" of fibonacci-buckets 0.2.0 (plugin "fibonacci")``."""
        return f'{self.noun} component "{self.name}" of {self.provenance}'


@attrs.frozen(kw_only=True)
class BrokenPlugin:
    """An installed plugin that cannot be used; none of its components exist and none of its hooks is called.

    Attributes:
        provenance: Which plugin.
        error: Why; names the distribution, its version, the cause and the remedy.
    """

    provenance: Provenance
    error: PluginError


def nouns_of(loader: PluginLoader, plugin: str) -> list[Noun]:
    """Return the nouns that one plugin offers.

    Raises:
        PluginLoadError: The plugin's hook raised.
        ContractError: It yielded something else, or one of the name of a table of the core.
    """
    found = _offered(loader, plugin, NOUNS_HOOK, Noun)
    for item in found:
        if item.name in _CORE_TABLES:
            provenance = loader.plugins[plugin]
            raise ContractError(
                f"noun {item.name} of {provenance}: the name is one of trencadis itself.", hint=provenance.remedy
            )
    return found


def components_of(loader: PluginLoader, plugin: str, nouns: Iterable[Noun]) -> Iterator[RegisteredComponent]:
    """Yield one plugin's components, checked, noun by noun.

    Raises:
        PluginLoadError: A register hook raised, or a component was written for another interface version, or the defaults of its
            config class cannot be used.
        ContractError: A hook yielded what is no usable component.
    """
    provenance = loader.plugins[plugin]
    for noun in nouns:
        for item in loader.offered(plugin, noun.hook):
            _check(noun, item, provenance)
            yield RegisteredComponent(noun=noun.name, name=item.name, component=item, provenance=provenance)


def add_component(table: dict[K, RegisteredComponent], key: K, new: RegisteredComponent) -> None:
    """Add a component to a table.

    Raises:
        ComponentConflictError: Another plugin has the name.
        ContractError: The same plugin yielded it before.
    """
    old = table.setdefault(key, new)
    if old is new:
        return
    raise _conflict(old, new)


def _conflict(old: RegisteredComponent, new: RegisteredComponent) -> PluginError:
    """Return the error for one name given twice; what comes with the engine is not what to block, or the other were active."""
    if old.provenance == new.provenance:
        return ContractError(
            f'{new.provenance} yielded the {new.noun} component "{new.name}" twice.', hint=new.provenance.remedy
        )
    others = [item.provenance for item in (old, new) if item.provenance.distribution != OUR_DISTRIBUTION]
    hint = f'Uninstall one of them, or block one: [plugins] blocked = ["{new.provenance.plugin}"].'
    return ComponentConflictError(
        f'Two plugins offer the {new.noun} component "{new.name}": {old.provenance} and {new.provenance}.',
        hint=others[0].remedy if len(others) == 1 else hint,
    )


def _check(noun: Noun, item: Any, provenance: Provenance) -> None:
    if not isinstance(item, Component):
        raise ContractError(
            f"{provenance} yielded {shown(item)} from {noun.hook}, where a trencadis.Component is expected.",
            hint=provenance.remedy,
        )
    owner = f'{noun.name} component "{item.name}" of {provenance}'
    refused = why_refused(noun, item.interface_version)
    if refused:
        raise PluginLoadError(f"{owner} is refused: {refused}.", hint=provenance.remedy)
    reserved = _RESERVED | {field.name for field in attrs.fields(type(Config().noun(noun.name)))}
    if noun.has_none:
        reserved -= {"none"}
    if item.name in reserved:
        raise ContractError(f"{owner}: the name is reserved.", hint=f"Not allowed: {', '.join(sorted(reserved))}.")
    _check_config_class(owner, f"{noun.name}.{item.name}", item.config, provenance)


def tables_of(loader: PluginLoader, plugin: str) -> dict[str, ConfigTable]:
    """Return the tables of its own that a plugin offers, checked, by name.

    Raises:
        PluginLoadError: The plugin's hook raised, or the defaults of a config class cannot be used.
        ContractError: It yielded what is no usable table, or one of the core's name.
    """
    provenance = loader.plugins[plugin]
    found: dict[str, ConfigTable] = {}
    for item in _offered(loader, plugin, "trencadis_tables", ConfigTable):
        owner = f"table [{item.name}] of {provenance}"
        if item.name in _CORE_TABLES or item.name in found:
            taken = "is one of trencadis itself" if item.name in _CORE_TABLES else "is offered twice"
            raise ContractError(f"{owner}: the name {taken}.", hint=provenance.remedy)
        _check_config_class(owner, item.name, item.config, provenance)
        found[item.name] = item
    return found


def checks_of(loader: PluginLoader, plugin: str) -> list[HealthCheck]:
    """Return a plugin's health checks.

    Raises:
        PluginLoadError: The plugin's hook raised.
        ContractError: It yielded something else.
    """
    return _offered(loader, plugin, "trencadis_health_checks", HealthCheck)


def placements_of(loader: PluginLoader, plugin: str) -> list[Placement]:
    """Return a plugin's placements.

    Raises:
        PluginLoadError: The plugin's hook raised.
        ContractError: It yielded something else, or one of the core's name.
    """
    found = _offered(loader, plugin, "trencadis_placements", Placement)
    for item in found:
        if item.name in HERE:
            provenance = loader.plugins[plugin]
            raise ContractError(
                f'placement "{item.name}" of {provenance}: the name is one of trencadis itself.', hint=provenance.remedy
            )
    return found


def _offered(loader: PluginLoader, plugin: str, hook: str, kind: type[ItemT]) -> list[ItemT]:
    found = loader.offered(plugin, hook)
    for item in found:
        if not isinstance(item, kind):
            provenance = loader.plugins[plugin]
            raise ContractError(
                f"{provenance} yielded {shown(item)} from {hook}, where a trencadis.interfaces.{kind.__name__} is expected.",
                hint=provenance.remedy,
            )
    return found


def _check_config_class(owner: str, table: str, config_class: Any, provenance: Provenance) -> None:
    if not attrs.has(config_class):
        raise ContractError(f"{owner}: config = {shown(config_class)} is no attrs class.", hint=provenance.remedy)
    try:
        settings = settings_of_table(table, config_class)
    except Exception as error:
        raise ContractError(
            f"{owner}: the fields of {config_class.__qualname__} cannot be read: {as_words(error)}.",
            hint="Annotate them with types that are imported at run time.",
        ) from error
    try:
        check_defaults(settings, table)
    except ConfigError as error:
        raise PluginLoadError(f"{owner}: {error}", hint=provenance.remedy) from error
