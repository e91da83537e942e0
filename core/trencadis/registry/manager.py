"""Loading plugins through pluggy: entry points, blocked names, misspelt hooks. Components are collected elsewhere.

blocked ▶ entry points, by name ▶ plugins given in code ▶ misspelt hooks are fatal
                └▶ on demand, and nothing names it: later, if at all
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Final, Self

import pluggy

from trencadis import hookspecs
from trencadis.errors import PluginError, PluginLoadError, did_you_mean
from trencadis.faults import as_words, reraise_interrupt
from trencadis.hookspecs import PROJECT_NAME
from trencadis.log import adopt_package
from trencadis.registry.provenance import Provenance, distribution_of, of_entry_point, of_object

__all__ = ["ON_DEMAND", "PluginLoader"]

ON_DEMAND: Final = "on_demand"
"""Extra of an entry point, ``name = "package [on_demand]"``: the plugin has nothing to do unless its name, or a table of that name, is
in the configuration, or a variable is set that begins with another extra, such as ``VLLM_``."""


class PluginLoader:
    """A pluggy manager that knows where each plugin comes from and speaks in :class:`PluginLoadError`.

    Args:
        blocked: Plugin names, or ``distribution:name``, that are never imported.

    Attributes:
        blocked: The same.
    """

    def __init__(self, blocked: Iterable[str] = ()) -> None:
        self._manager = pluggy.PluginManager(PROJECT_NAME)
        self._manager.add_hookspecs(hookspecs)
        self.blocked = frozenset(blocked)
        self._provenance: dict[str, Provenance] = {}
        self._installed: list[tuple[Provenance, PluginError | None]] = []
        self._rest: list[tuple[EntryPoint, Provenance]] = []

    @classmethod
    def of_installed(
        cls,
        blocked: Iterable[str] = (),
        *,
        entry_points: Iterable[EntryPoint] | None = None,
        mentions: Callable[[str], bool] = lambda _: True,
    ) -> Self:
        """Import the installed plugins; raises nothing. What they print meanwhile goes to standard error.

        Args:
            blocked: See :class:`PluginLoader`.
            entry_points: None: those installed in the group ``trencadis``.
            mentions: ``mentions(name)`` returns whether a plugin that is there on demand is asked for; else :meth:`load_rest` loads it.
        """
        loader = cls(blocked)
        for entry_point, provenance in loader.candidates(entry_points):
            extras = {*entry_point.extras}
            if ON_DEMAND in extras and not any(map(mentions, {entry_point.name, *extras} - {ON_DEMAND})):
                loader._rest.append((entry_point, provenance))
            else:
                loader._load_installed(entry_point, provenance)
        return loader

    def load_rest(self, only: str = "") -> Sequence[tuple[Provenance, PluginError | None]]:
        """Import the installed plugins that nothing had asked for, and return them as :attr:`installed` does; raises nothing.

        Args:
            only: Name of the entry points that are loaded; empty: all.
        """
        rest = [one for one in self._rest if only in ("", one[0].name)]
        self._rest = [one for one in self._rest if one not in rest]
        before = len(self._installed)
        for entry_point, provenance in rest:
            self._load_installed(entry_point, provenance)
        loaded = self._installed[before:]
        self._installed.sort(key=lambda one: one[0].plugin.rpartition(":")[2])
        return loaded

    def _load_installed(self, entry_point: EntryPoint, provenance: Provenance) -> None:
        error = None
        with contextlib.redirect_stdout(sys.stderr):
            try:
                self.load_entry_point(entry_point, provenance)
            except PluginLoadError as raised:
                error = raised
        self._installed.append((provenance, error))

    @property
    def installed(self) -> Sequence[tuple[Provenance, PluginError | None]]:
        """Provenance of each installed plugin that was asked for, sorted by name, and why it could not be loaded; None: it is."""
        return self._installed

    @property
    def hooks(self) -> pluggy.HookRelay:
        """The hooks of all plugins."""
        return self._manager.hook

    @property
    def plugins(self) -> Mapping[str, Provenance]:
        """Provenance of every loaded plugin by its name, in the order of loading."""
        return self._provenance

    def hooks_of(self, plugin: str, hook: str) -> Any:
        """Return a caller of one hook that reaches one plugin only."""
        others = [item for name, item in self._manager.list_name_plugin() if name != plugin]
        return self._manager.subset_hook_caller(hook, others)

    def has_hook(self, plugin: str, hook: str) -> bool:
        """True if the plugin implements the hook. Pure."""
        caller = getattr(self.hooks, hook, None)  # of a plugin's noun nobody may have one
        return caller is not None and any(item.plugin_name == plugin for item in caller.get_hookimpls())

    def offered(self, plugin: str, hook: str) -> list[Any]:
        """Return what a plugin yields from a register hook; nothing if it does not implement the hook.

        Raises:
            PluginLoadError: It raised.
        """
        if not self.has_hook(plugin, hook):
            return []
        try:
            return [item for items in self.hooks_of(plugin, hook)() for item in items]
        except BaseException as error:
            reraise_interrupt(error)
            raise _broken(self._provenance[plugin], f"raised in {hook}", error) from error

    def candidates(self, entry_points: Iterable[EntryPoint] | None) -> list[tuple[EntryPoint, Provenance]]:
        """Return entry points with their provenance, sorted by name, without the blocked ones; imports nothing.

        Args:
            entry_points: None: those installed in the group ``trencadis``.
        """
        found = list(importlib.metadata.entry_points(group=PROJECT_NAME) if entry_points is None else entry_points)
        found.sort(key=lambda item: (item.name, distribution_of(item)[0]))
        counts = Counter(item.name for item in found)
        kept = []
        for item in found:
            full_name = f"{distribution_of(item)[0]}:{item.name}"
            if not self.blocked & {item.name, full_name}:
                kept.append((item, of_entry_point(item, plugin=item.name if counts[item.name] == 1 else full_name)))
        return kept

    def load_entry_point(self, entry_point: EntryPoint, provenance: Provenance) -> None:
        """Import and register one entry point.

        Raises:
            PluginLoadError: It raised while it was imported or registered.
        """
        adopt_package(entry_point.module)
        try:
            plugin = entry_point.load()
        except BaseException as error:
            reraise_interrupt(error)
            raise _broken(provenance, "could not be imported", error) from error
        self._register(plugin, provenance)

    def load_object(self, plugin: Any) -> str:
        """Register a module or object given in code; returns its name, or an empty string if that is blocked.

        Raises:
            PluginLoadError: It cannot be registered.
        """
        provenance = of_object(plugin)
        if provenance.plugin in self.blocked:
            return ""
        adopt_package(provenance.module)
        self._register(plugin, provenance)
        return provenance.plugin

    def unload(self, plugin: str) -> None:
        """Forget a plugin: none of its hooks is called any more. Nothing happens if it was not registered."""
        if self._provenance.pop(plugin, None) is not None:
            self._manager.unregister(name=plugin)

    def check_hooks(self, plugin: str, more: Collection[str] = ()) -> None:
        """Refuse misspelt hooks of one plugin.

        Args:
            plugin: Name of the plugin.
            more: Hooks that exist beside those of the core.

        Raises:
            PluginLoadError: It implements a hook that does not exist.
        """
        callers: Collection[Any] = list(vars(self.hooks).values())
        known = [caller.name for caller in callers if isinstance(caller, pluggy.HookCaller) and caller.has_spec()]
        known += more
        for caller in callers:
            if not isinstance(caller, pluggy.HookCaller) or caller.name in known:
                continue
            for item in caller.get_hookimpls():
                if item.plugin_name == plugin and not item.optionalhook:
                    provenance = self._provenance[item.plugin_name]
                    raise PluginLoadError(
                        f'{provenance} implements "{caller.name}": no such hook.{did_you_mean(caller.name, known)}',
                        hint=provenance.remedy,
                    )

    def _register(self, plugin: Any, provenance: Provenance) -> None:
        unmarked = [name for name in _hook_names() if _is_unmarked(plugin, name)]
        if unmarked:
            raise PluginLoadError(
                f"{provenance} defines {unmarked[0]} without @hookimpl, so it would never be called.",
                hint=provenance.remedy,
            )
        try:
            self._manager.register(plugin, provenance.plugin)
        except BaseException as error:
            reraise_interrupt(error)
            raise _broken(provenance, "could not be registered", error) from error
        self._provenance[provenance.plugin] = provenance


def _broken(provenance: Provenance, what: str, error: BaseException) -> PluginLoadError:
    line = provenance.line_of(error)
    where = f", {line}" if line else ""
    return PluginLoadError(f"{provenance} {what}: {as_words(error)}{where}.", hint=provenance.remedy)


def _hook_names() -> list[str]:
    return [name for name, item in vars(hookspecs).items() if name.startswith("trencadis_") and callable(item)]


def _is_unmarked(plugin: Any, name: str) -> bool:
    item = getattr(plugin, name, None)
    return callable(item) and getattr(hookspecs, name) is not item and not hasattr(item, f"{PROJECT_NAME}_impl")
