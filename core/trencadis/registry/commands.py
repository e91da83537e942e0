"""Commands that plugins offer, found without building a registry: one that is broken hides its own commands only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping

import attrs

from trencadis.errors import ComponentConflictError, ContractError, PluginError
from trencadis.faults import shown
from trencadis.interfaces.command import Command
from trencadis.registry.manager import PluginLoader
from trencadis.registry.provenance import Provenance

__all__ = ["InstalledCommands", "installed_commands"]

_HOOK = "trencadis_commands"


@attrs.frozen
class InstalledCommands:
    """Commands of plugins.

    Attributes:
        commands: By name, in the order in which plugins are loaded.
        broken: Why plugins offer none, by plugin.
    """

    commands: Mapping[str, Command]
    broken: Mapping[str, PluginError]


def installed_commands(own: Collection[str], plugins: PluginLoader) -> InstalledCommands:
    """Return the commands of the installed plugins.

    Args:
        own: Names of the commands of the core, which a plugin cannot have.
        plugins: The plugins, loaded.
    """
    found: dict[str, tuple[Command, Provenance]] = {}
    broken: dict[str, PluginError] = {}
    for provenance, error in plugins.installed:
        try:
            if error is not None:
                raise error
            # Standard output is for the command's own.
            with contextlib.redirect_stdout(sys.stderr):
                offered = _commands_of(plugins, provenance)
            for command in offered:
                _check_free(command, provenance, own, found)
        except PluginError as raised:
            broken[provenance.plugin] = raised
            continue
        found.update((command.name, (command, provenance)) for command in offered)
    return InstalledCommands({name: command for name, (command, _) in found.items()}, broken)


def _commands_of(loader: PluginLoader, provenance: Provenance) -> list[Command]:
    offered = loader.offered(provenance.plugin, _HOOK)
    for item in offered:
        if not isinstance(item, Command):
            raise ContractError(
                f"{provenance} yielded {shown(item)} from {_HOOK}, where a trencadis.interfaces.Command is expected.",
                hint=provenance.remedy,
            )
    return offered


def _check_free(
    command: Command, provenance: Provenance, own: Collection[str], found: Mapping[str, tuple[Command, Provenance]]
) -> None:
    if command.name in own:
        raise ComponentConflictError(
            f'{provenance} offers the command "{command.name}", which is one of trencadis itself.',
            hint=provenance.remedy,
        )
    if command.name in found:
        raise ComponentConflictError(
            f'Two plugins offer the command "{command.name}": {found[command.name][1]} and {provenance}.',
            hint=f'Uninstall one of them, or block one: [plugins] blocked = ["{provenance.plugin}"].',
        )
