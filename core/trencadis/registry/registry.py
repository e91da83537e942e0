"""The registry: every component that plugins offer, and typed calls of every hook, so that callers never touch pluggy."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from trencadis.config import Config
from trencadis.config.messages import spot, with_origin
from trencadis.errors import (
    ConfigValueError,
    ContractError,
    PluginLoadError,
    TrencadisError,
    UnknownComponentError,
    did_you_mean,
)
from trencadis.hookspecs import NOUNS
from trencadis.interfaces.component import ComponentContext
from trencadis.records import ModelFacts
from trencadis.registry.collect import RegisteredComponent, add_component, components_of
from trencadis.registry.contracts import CONTRACTS
from trencadis.registry.import_path import import_component
from trencadis.registry.manager import PluginLoader
from trencadis.registry.provenance import Provenance

__all__ = ["Registry"]


class Registry:
    """Components by noun and name. Made by :meth:`discover`; used at start-up and shut-down only, on one thread."""

    def __init__(self, loader: PluginLoader) -> None:
        self._loader = loader
        self._components: dict[str, dict[str, RegisteredComponent]] = {noun: {} for noun in NOUNS}
        self._sources: Mapping[str, str] = {}
        self._configured: Config | None = None

    @classmethod
    def discover(
        cls,
        *,
        blocked: Iterable[str] = (),
        extra_plugins: Iterable[Any] = (),
        entry_points: Iterable[EntryPoint] | None = None,
    ) -> Registry:
        """Load plugins and collect their components. Imports the plugins, but none of what they offer.

        What they print meanwhile goes to standard error: standard output is a command's own.

        Args:
            blocked: Plugin names, or ``distribution:name``, that are never imported.
            extra_plugins: Modules or objects with hook implementations, after the entry points.
            entry_points: None: those installed in the group ``trencadis``.

        Raises:
            PluginLoadError: A plugin raised, misspells a hook, or was written for another interface version.
            ComponentConflictError: Two plugins offer one name.
            ContractError: A plugin yields what is no usable component.
        """
        registry = cls(PluginLoader(blocked))
        with contextlib.redirect_stdout(sys.stderr):
            registry._loader.load_entry_points(entry_points)
            for plugin in extra_plugins:
                registry._loader.load_object(plugin)
            registry._loader.check_hooks()
            for name in registry._loader.plugins:
                registry._collect(name)
        return registry

    def register(self, plugin: Any) -> None:
        """Load one more plugin, given in code; it gets an earlier ``trencadis_configure`` at once.

        Raises:
            PluginLoadError: As in :meth:`discover`.
            ComponentConflictError: As in :meth:`discover`.
            ContractError: As in :meth:`discover`.
        """
        name = self._loader.load_object(plugin)
        self._loader.check_hooks()
        if name:
            self._collect(name)

    def _collect(self, plugin: str) -> None:
        for found in components_of(self._loader, plugin):
            add_component(self._components[found.noun], found)

    # ------------------------------------------------------------------------------------------------ components

    @property
    def sources(self) -> Mapping[str, str]:
        """Who set each value of the configuration, by dotted path; empty if the registry was not told."""
        return self._sources

    def note_sources(self, sources: Mapping[str, str]) -> None:
        """Remember who set each value, so that messages about a component can say it."""
        self._sources = sources

    @property
    def plugins(self) -> Mapping[str, Provenance]:
        """Provenance of every loaded plugin, by name."""
        return self._loader.plugins

    def components(self, noun: str) -> dict[str, RegisteredComponent]:
        """Return a noun's components by name, sorted. Pure."""
        return dict(sorted(self._components[noun].items()))

    def config_classes(self) -> dict[str, dict[str, type[Any]]]:
        """Return every component's config class by noun and name, as ``load_config`` takes them. Pure."""
        return {
            noun: {name: item.component.config for name, item in self.components(noun).items()}
            for noun in self._components
        }

    def select(self, noun: str, name: str, *, source: str = "", key: str = "name") -> RegisteredComponent:
        """Return a component by name, or by import path ``package.module:Attribute``, which is imported.

        Args:
            noun: Such as ``bucketing``.
            name: As the config has it.
            source: Who set it, such as ``serve.toml``; for messages.
            key: Key of the noun's table that holds it; for messages.

        Raises:
            UnknownComponentError: No plugin offers it.
            PluginLoadError: The import path cannot be imported.
            ContractError: What it leads to is not of the noun's contract.
        """
        if ":" in name:
            return import_component(noun, name, key=f"{noun}.{key}", source=source)
        found = self._components[noun].get(name)
        if found is not None:
            return found
        names = list(self.components(noun))
        choices = f"Choose one of: {', '.join(names)}." if names else f"No plugin offers any {noun} component."
        raise UnknownComponentError(
            f"{spot(f'{noun}.{key}', name, source)}: no such component. {choices}{did_you_mean(name, names)}",
            hint='Another takes its package installed, or an import path "package.module:Class".',
        )

    def build(self, registered: RegisteredComponent, config: Any, context: ComponentContext) -> Any:
        """Call a component's factory and check what it returns.

        Args:
            registered: Which component.
            config: An instance of its config class; a mapping of options for one given by import path.
            context: What the factory may know.

        Raises:
            PluginLoadError: The factory raised. What is a ``TrencadisError`` already passes; if it is about a value, it says
                who set that.
            ContractError: It returned something of another type than the noun's contract.
        """
        try:
            made = registered.component.factory(config, context)
        except ConfigValueError as error:
            error.args = (with_origin(str(error), self._sources),)
            raise
        except TrencadisError:
            raise
        except Exception as error:
            raise PluginLoadError(
                f"{registered} could not be built: {type(error).__name__}: {error}.", hint=registered.provenance.remedy
            ) from error
        contract = CONTRACTS[registered.noun]
        if not isinstance(made, contract):
            raise ContractError(
                f"{registered} built a {type(made).__qualname__}, which is no {contract.__name__}.",
                hint=registered.provenance.remedy,
            )
        return made

    # ----------------------------------------------------------------------------------------------------- hooks

    def configure(self, config: Config) -> None:
        """Show the resolved configuration to every plugin, also to those registered later.

        A second call with an equal configuration does nothing.

        Raises:
            PluginLoadError: A plugin raised.
        """
        if config == self._configured:
            return
        self._configured = config
        self._call("trencadis_configure", lambda hook: hook.call_historic(kwargs={"config": config}))

    def select_backend(self, default: str) -> str:
        """Return the first answer of the plugins to "which backend?", or ``default`` if none answers.

        Raises:
            PluginLoadError: A plugin raised.
        """
        candidates = tuple(self.components("backend"))
        answer = self._call("trencadis_select_backend", lambda hook: hook(candidates=candidates))
        return default if answer is None else str(answer)

    def ready(self, model: ModelFacts, plan_hash: str) -> None:
        """Tell every plugin that an engine is ready for requests.

        Args:
            model: The loaded model.
            plan_hash: Of the resolved plan.

        Raises:
            PluginLoadError: A plugin raised.
        """
        self._call("trencadis_engine_ready", lambda hook: hook(model=model, plan_hash=plan_hash))

    def closing(self) -> None:
        """Tell every plugin that an engine is about to close.

        Raises:
            PluginLoadError: A plugin raised.
        """
        self._call("trencadis_engine_closing", lambda hook: hook())

    def _call(self, name: str, call: Callable[[Any], Any]) -> Any:
        hook = getattr(self._loader.hooks, name)
        try:
            return call(hook)
        except TrencadisError:
            raise
        except Exception as error:
            blamed = self._that_raised(hook, error)
            who, hint = "A plugin", f"Plugins with this hook: {'; '.join(map(str, blamed))}."
            if len(blamed) == 1:
                who, hint = str(blamed[0]), blamed[0].remedy
            raise PluginLoadError(f"{who} raised in {name}: {type(error).__name__}: {error}.", hint=hint) from error

    def _that_raised(self, hook: Any, error: Exception) -> list[Provenance]:
        """Return the plugin in whose hook an error was raised; all with the hook if that cannot be told."""
        owners = hook.get_hookimpls()
        codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        found = [item for item in owners if getattr(item.function, "__code__", None) in codes]
        return [self.plugins[item.plugin_name] for item in found or owners]
