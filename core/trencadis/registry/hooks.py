"""Typed calls of the hooks that plugins implement, so that callers never touch pluggy."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trencadis.config import Config
from trencadis.errors import ConfigError, PluginLoadError, TrencadisError
from trencadis.faults import as_words, reraise_interrupt
from trencadis.records import ModelFacts
from trencadis.registry.left_out import LeftOut
from trencadis.registry.manager import PluginLoader
from trencadis.registry.provenance import Provenance

__all__ = ["Hooks"]


class Hooks:
    """Calls hooks of all loaded plugins.

    Args:
        loader: The plugins.
        left_out: Named where no plugin answers.
    """

    def __init__(self, loader: PluginLoader, left_out: LeftOut) -> None:
        self._loader = loader
        self._left_out = left_out
        self._configured: Config | None = None

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

    def check_lock(self, file: Path, config: Config, registry: object) -> None:
        """Let plugins refuse a configuration that is not the one of a lock file.

        Args:
            file: The lock file.
            config: The configuration.
            registry: The registry; passed to the plugins.

        Raises:
            PlanLockError: It is not.
            ConfigError: The file cannot be used, or no plugin reads such files.
            PluginLoadError: A plugin raised.
        """
        if not self._loader.hooks.trencadis_check_lock.get_hookimpls():
            raise ConfigError("--locked: no plugin that reads lock files can be used.", hint=self._left_out.in_words())
        self._call("trencadis_check_lock", lambda hook: hook(file=file, config=config, registry=registry))

    def select_backend(self, default: str, candidates: Callable[[], Iterable[str]]) -> str:
        """Return the first answer of the plugins to "which backend?", or ``default`` if none answers.

        Args:
            default: Name of a backend.
            candidates: Returns the names of all backends; called if a plugin is asked.

        Raises:
            PluginLoadError: A plugin raised.
        """
        if not self._loader.hooks.trencadis_select_backend.get_hookimpls():
            return default
        names = tuple(candidates())
        answer = self._call("trencadis_select_backend", lambda hook: hook(candidates=names))
        return default if answer is None else str(answer)

    def ready(self, model: ModelFacts, plan_hash: str) -> None:
        """Tell every plugin that an engine is ready for requests.

        Args:
            model: The loaded model.
            plan_hash: Hash of the resolved plan.

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
        except BaseException as error:
            reraise_interrupt(error)
            blamed = self._that_raised(hook, error)
            who, hint = "A plugin", f"Plugins with this hook: {'; '.join(map(str, blamed))}."
            if len(blamed) == 1:
                who, hint = str(blamed[0]), blamed[0].remedy
            raise PluginLoadError(f"{who} raised in {name}: {as_words(error)}.", hint=hint) from error

    def _that_raised(self, hook: Any, error: BaseException) -> list[Provenance]:
        """Return the plugin in whose hook an error was raised; all with the hook if that cannot be told."""
        owners = hook.get_hookimpls()
        codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        found = [item for item in owners if getattr(item.function, "__code__", None) in codes]
        return [self._loader.plugins[item.plugin_name] for item in found or owners]
