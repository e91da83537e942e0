"""The registry: every component that plugins offer."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any

import attrs

from trencadis.config import Settings, settings_of
from trencadis.config.import_paths import is_import_path, refuse_import_path
from trencadis.config.messages import spot, with_origin
from trencadis.config.settings import with_nouns
from trencadis.errors import (
    ComponentConflictError,
    ConfigValueError,
    ContractError,
    PluginError,
    PluginLoadError,
    TrencadisError,
    UnknownComponentError,
    did_you_mean,
)
from trencadis.faults import as_words, reraise_interrupt
from trencadis.interfaces.component import ComponentContext
from trencadis.interfaces.config_table import ConfigTable
from trencadis.interfaces.health_check import HealthCheck
from trencadis.interfaces.noun import Noun
from trencadis.interfaces.placement import Placement
from trencadis.registry.collect import (
    NOUNS_HOOK,
    BrokenPlugin,
    RegisteredComponent,
    add_component,
    checks_of,
    components_of,
    nouns_of,
    placements_of,
    tables_of,
)
from trencadis.registry.contracts import CORE_NOUNS
from trencadis.registry.hooks import Hooks
from trencadis.registry.import_path import import_component
from trencadis.registry.left_out import LeftOut
from trencadis.registry.manager import PluginLoader
from trencadis.registry.provenance import Provenance
from trencadis.registry.stages import RegisteredStage, in_order, stages_of

__all__ = ["Registry"]

logger = logging.getLogger("trencadis.registry")


class Registry:
    """Components by noun and name. Made by :meth:`discover`; used at start-up and shut-down only, on one thread.

    Attributes:
        left_out: Installed plugins that cannot be used, and contested names, among the plugins that are loaded.
        hooks: Calls hooks of all plugins.
        sources: Who set each value of the configuration, by dotted path, for messages about a component; empty if the registry was not told.
    """

    def __init__(self, loader: PluginLoader, *, strict: bool = False) -> None:
        self._loader = loader
        self._strict = strict
        self.left_out = LeftOut()
        self.hooks = Hooks(loader, self.left_out)
        self._own_nouns: dict[str, Noun] = {}
        self._components: dict[str, dict[str, RegisteredComponent]] = {noun: {} for noun in CORE_NOUNS}
        self._tables: dict[str, tuple[ConfigTable, Provenance]] = {}
        self._stages: dict[str, RegisteredStage] = {}
        self.sources: Mapping[str, str] = {}

    @classmethod
    def discover(
        cls,
        *,
        blocked: Iterable[str] = (),
        extra_plugins: Iterable[Any] = (),
        entry_points: Iterable[EntryPoint] | None = None,
        strict: bool = False,
        mentions: Callable[[str], bool] = lambda _: True,
    ) -> Registry:
        """Load plugins and collect their components, as :meth:`of` does.

        Args:
            blocked: Plugin names, or ``distribution:name``, that are never imported.
            extra_plugins: See :meth:`of`.
            entry_points: None: those installed in the group ``trencadis``.
            strict: See :meth:`of`.
            mentions: See :meth:`PluginLoader.of_installed`; by default all are loaded.

        Raises:
            PluginError: See :meth:`of`.
        """
        loader = PluginLoader.of_installed(blocked, entry_points=entry_points, mentions=mentions)
        return cls.of(loader, extra_plugins=extra_plugins, strict=strict)

    @classmethod
    def of(cls, loader: PluginLoader, *, extra_plugins: Iterable[Any] = (), strict: bool = False) -> Registry:
        """Collect the components of loaded plugins. Imports none of what they offer.

        What they print meanwhile goes to standard error: standard output is a command's own. An installed plugin that cannot
        be used is left out and listed in :attr:`broken`, and a name that two installed plugins offer is left out and listed in
        :attr:`contested`: :meth:`select` refuses where one of them is asked for. Plugins given in code must be usable.

        Args:
            loader: The installed plugins; belongs to the registry from now on.
            extra_plugins: Modules or objects with hook implementations, after the entry points.
            strict: Raise for an installed plugin that cannot be used and for contested names too.

        Raises:
            PluginLoadError: A plugin raised, misspells a hook, or was written for another interface version.
            ComponentConflictError: Two plugins offer one name.
            ContractError: A plugin yields what is no usable component.
        """
        registry = cls(loader, strict=strict)
        with contextlib.redirect_stdout(sys.stderr):
            # Who offers nouns comes first: components of these are found in any plugin.
            for provenance, failure in sorted(
                loader.installed, key=lambda one: not loader.has_hook(one[0].plugin, NOUNS_HOOK)
            ):
                registry._collect_installed(provenance, failure)
            for name in [loader.load_object(plugin) for plugin in extra_plugins]:
                if name:
                    registry._collect(name, strict=True)
        return registry

    def complete(self, only: str = "") -> bool:
        """Load the installed plugins that nothing had asked for; returns whether there were any. Whatever lists all does so first.

        Args:
            only: Name of the entry points that are loaded; empty: all.

        Raises:
            PluginError: See :meth:`of`.
        """
        rest = self._loader.load_rest(only)
        with contextlib.redirect_stdout(sys.stderr):
            for provenance, failure in rest:
                self._collect_installed(provenance, failure)
        return bool(rest)

    def _collect_installed(self, provenance: Provenance, failure: PluginError | None) -> None:
        try:
            if failure is not None:
                raise failure
            self._collect(provenance.plugin, strict=self._strict)
        except PluginError as error:
            if self._strict:
                raise
            self._loader.unload(provenance.plugin)
            self.left_out.broken[provenance.plugin] = BrokenPlugin(provenance=provenance, error=error)

    def register(self, plugin: Any) -> None:
        """Load one more plugin, given in code; it gets an earlier ``trencadis_configure`` at once.

        Raises:
            PluginLoadError: The plugin cannot be loaded; see :meth:`discover`.
            ComponentConflictError: Two plugins have a component of one name; see :meth:`discover`.
            ContractError: A component breaks its contract; see :meth:`discover`.
        """
        name = self._loader.load_object(plugin)
        if name:
            self._collect(name, strict=True)

    def _collect(self, plugin: str, *, strict: bool) -> None:
        """Add a plugin's components and tables: all of them, or none if one of them cannot be used."""
        self.__dict__.pop("settings", None)
        offered = {noun.name: noun for noun in nouns_of(self._loader, plugin)}
        for name in offered.keys() & self._own_nouns.keys():
            raise ComponentConflictError(
                f"Two plugins offer the noun {name}; one is {self._loader.plugins[plugin]}.",
                hint=f'Uninstall one of them, or block one: [plugins] blocked = ["{plugin}"].',
            )
        nouns = {**self._own_nouns, **offered}
        self._loader.check_hooks(plugin, [noun.hook for noun in nouns.values()])
        provenance = self._loader.plugins[plugin]
        tables = tables_of(self._loader, plugin)
        for name in tables.keys() & self._tables.keys():
            raise ComponentConflictError(
                f"Two plugins offer the table [{name}]: {self._tables[name][1]} and {provenance}.",
                hint=f'Uninstall one of them, or block one: [plugins] blocked = ["{plugin}"].',
            )
        stages = stages_of(self._loader, plugin)
        for name in stages.keys() & self._stages.keys():
            raise ComponentConflictError(
                f"Two plugins offer one name: {self._stages[name]} and {stages[name]}.",
                hint=f'Uninstall one of them, or block one: [plugins] blocked = ["{plugin}"].',
            )
        in_order(self._stages | stages)
        own: dict[tuple[str, str], RegisteredComponent] = {}
        for found in components_of(self._loader, plugin, (*CORE_NOUNS.values(), *nouns.values())):
            add_component(own, (found.noun, found.name), found)
        self._own_nouns = nouns
        for name in offered:
            self._components.setdefault(name, {})
        self._stages |= stages
        self._tables.update((name, (table, provenance)) for name, table in tables.items())
        for (noun, name), found in own.items():
            try:
                add_component(self._components[noun], name, found)
            except ComponentConflictError as error:
                if strict:
                    raise
                self.left_out.contested[noun, name] = error
        for noun, name in self.left_out.contested:
            self._components[noun].pop(name, None)

    # ------------------------------------------------------------------------------------------------ components

    @property
    def nouns(self) -> Mapping[str, Noun]:
        """Every noun by name: those of the core, and each of a plugin after the one that it helps."""
        both = {**CORE_NOUNS, **self._own_nouns}
        return {name: both[name] for name in with_nouns(CORE_NOUNS, self._own_nouns.values())}

    @property
    def stages(self) -> tuple[RegisteredStage, ...]:
        """The stages of the loaded plugins, in the order in which an engine calls them."""
        return in_order(self._stages)

    @property
    def plugins(self) -> Mapping[str, Provenance]:
        """Provenance of every plugin that can be used, by name."""
        self.complete()
        return self._loader.plugins

    @property
    def given_in_code(self) -> list[Provenance]:
        """Provenance of the plugins that are not installed: they cannot travel to another process."""
        return [one for one in self._loader.plugins.values() if not one.distribution]

    @property
    def broken(self) -> Mapping[str, BrokenPlugin]:
        """Installed plugins that cannot be used, by name."""
        self.complete()
        return self.left_out.broken

    @property
    def contested(self) -> Mapping[tuple[str, str], ComponentConflictError]:
        """Names that more than one installed plugin offers, by noun and name; none of the components can be selected."""
        self.complete()
        return self.left_out.contested

    def components(self, noun: str) -> dict[str, RegisteredComponent]:
        """Return a noun's components by name, sorted."""
        self.complete()
        return dict(sorted(self._components[noun].items()))

    def offers(self, noun: str, name: str) -> bool:
        """Return whether there is a component."""
        return name in self._components[noun] or (self.complete() and name in self._components[noun])

    @functools.cached_property
    def settings(self) -> Settings:
        """The catalogue of settings of the core and of the components that are loaded; :meth:`complete` adds the others."""
        return settings_of(self._config_classes(), self._own_nouns.values())

    def _config_classes(self) -> dict[str, dict[str, type[Any]] | type[Any]]:
        return {name: table.config for name, (table, _) in self._tables.items()} | {
            noun: {name: item.component.config for name, item in sorted(found.items())}
            for noun, found in self._components.items()
        }

    def health_checks_of(self, plugin: str) -> list[HealthCheck]:
        """Return the sections of ``trencadis doctor`` that a loaded plugin offers.

        Raises:
            PluginLoadError: The plugin's hook raised.
            ContractError: It yielded something else.
        """
        return checks_of(self._loader, plugin)

    def placements(self) -> dict[str, Placement]:
        """Return the placements of the loaded plugins by name.

        Raises:
            ComponentConflictError: Two plugins offer one name.
            PluginLoadError: The hook of a plugin raised.
            ContractError: A plugin yields what is no placement.
        """
        found: dict[str, tuple[Placement, Provenance]] = {}
        for plugin, provenance in self._loader.plugins.items():
            for one in placements_of(self._loader, plugin):
                if one.name in found:
                    raise ComponentConflictError(
                        f'Two plugins offer the placement "{one.name}": {found[one.name][1]} and {provenance}.',
                        hint=f'Uninstall one of them, or block one: [plugins] blocked = ["{plugin}"].',
                    )
                found[one.name] = one, provenance
        return {name: one for name, (one, _) in found.items()}

    def select(
        self, noun: str, name: str, *, source: str = "", key: str = "name", may_import: bool = False
    ) -> RegisteredComponent:
        """Return a component by name, or by import path ``package.module:Attribute``, which is imported.

        Args:
            noun: Such as ``bucketing``.
            name: Name in the config.
            source: Who set it, such as ``serve.toml``; for messages.
            key: Key of the noun's table that holds it; for messages.
            may_import: The operator gave the name; else no import path is followed.

        Raises:
            ImportPathRefusedError: It is an import path, and may not be followed.
            UnknownComponentError: No usable plugin offers it; the message names the broken ones.
            ComponentConflictError: Several installed plugins offer it.
            PluginLoadError: The import path cannot be imported.
            ContractError: The object at the path does not keep the noun's contract.
        """
        if is_import_path(name):
            if not may_import:
                raise refuse_import_path(f"{noun}.{key}", name, source)
            return import_component(self.nouns[noun], name, key=f"{noun}.{key}", source=source)
        if (noun, name) not in self.left_out.contested and self.offers(noun, name):
            return self._components[noun][name]
        if (noun, name) in self.left_out.contested:
            raise self.left_out.contested[noun, name]
        names = list(self.components(noun))
        trouble = self.left_out.in_words()
        choices = f"Choose one of: {', '.join(names)}." if names else f"No plugin offers any {noun} component."
        raise UnknownComponentError(
            f"{spot(f'{noun}.{key}', name, source)}: no such component.{did_you_mean(name, names)} {choices}",
            hint=trouble or 'To use another one, install its package, or give an import path "package.module:Class".',
        )

    def prepare(self, registered: RegisteredComponent, config: Any) -> None:
        """Let a component prepare this process, before any component is built.

        Raises:
            PluginLoadError: It raised; as in :meth:`build`.
        """
        with self._errors_of(registered, "prepared"):
            registered.component.prepare(config)

    def preload(self, registered: RegisteredComponent, config: Any) -> None:
        """Let a component import what it will need, if it offers to.

        Raises:
            PluginLoadError: It raised; as in :meth:`build`.
        """
        with self._errors_of(registered, "preloaded"):
            if registered.component.preload is not None:
                registered.component.preload(config)

    @contextlib.contextmanager
    def _errors_of(self, registered: RegisteredComponent, what: str) -> Iterator[None]:
        try:
            yield
        except ConfigValueError as error:
            error.args = (with_origin(str(error), self.sources),)
            raise
        except TrencadisError:
            raise
        except BaseException as error:
            reraise_interrupt(error)
            raise PluginLoadError(
                f"{registered} could not be {what}: {as_words(error)}.",
                hint=registered.provenance.remedy,
            ) from error

    def build(self, registered: RegisteredComponent, config: Any, context: ComponentContext) -> Any:
        """Call a component's factory and check what it returns.

        Args:
            registered: Which component.
            config: An instance of its config class; a mapping of options for one given by import path.
            context: Context that the factory may know.

        Raises:
            PluginLoadError: The factory raised. What is a ``TrencadisError`` already passes; if it is about a value, it says
                who set that.
            ContractError: It returned something of another type than the noun's contract.
        """
        with self._errors_of(registered, "built"):
            made = registered.component.factory(config, attrs.evolve(context, label=str(registered)))
        contract = self.nouns[registered.noun].contract
        if not isinstance(made, contract):
            raise ContractError(
                f"{registered} built a {type(made).__qualname__}, which is no {contract.__name__}.",
                hint=registered.provenance.remedy,
            )
        return made
