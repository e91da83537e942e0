"""``trencadis new-plugin``: a new plugin package, ready to install and to test."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trencadis.api import Registry
    from trencadis_tools.new_plugin import PluginNames

__all__ = ["TAKES_CONFIG", "add_arguments", "run_alone"]

TAKES_CONFIG = False
"""The command uses no configuration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("noun", metavar="NOUN", help="what it plugs into, such as scheduling or kv_connector, or stage")
    parser.add_argument("name", metavar="NAME", help="what it is called, such as lottery")
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="D", help="where its folder is made (default: here)"
    )


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Write the package and print the next steps; returns 0.

    Raises:
        ConfigValueError: An unknown noun, a name that cannot be used or is taken, or a folder that exists.
    """
    from trencadis.api import Registry
    from trencadis_tools.new_plugin import STAGE, STARTS, PluginNames, new_plugin

    names = PluginNames.read(args.noun, args.name)
    _refuse_taken(names, Registry.of(args.plugins))
    home, files = new_plugin(names, args.directory)
    print(f"{home}:")
    print(textwrap.indent("\n".join(str(file) for file in files), "  "))
    start, choice = STARTS[names.noun], f'select it: [{names.noun}] name = "{names.name}"'
    if names.noun == STAGE:
        choice = f"switch it on: [{names.name}] {start.option.name} = {start.example}"
    elif names.noun == "observer":
        choice = f'select it: [observer] names = ["log", "{names.name}"]'
    print(f'\nNow: cd {home} && pip install -e ".[test]" && pytest\nThen {choice}')
    return 0


def _refuse_taken(names: PluginNames, registry: Registry) -> None:
    """Refuse the name of an installed component, stage or table: both could not be loaded together."""
    from trencadis.errors import ConfigValueError
    from trencadis_tools.new_plugin import STAGE

    if names.noun == STAGE:
        registry.complete()
        stages = {one.definition.name: one.provenance for one in registry.stages}
        taken, what = stages.get(names.name), "stage"
        if taken is None and names.name in registry.settings.tables():
            raise ConfigValueError(f"new-plugin: there is a table [{names.name}] already.", hint="Choose another name.")
    else:
        component = registry.components(names.noun).get(names.name)
        taken, what = component.provenance if component else None, f"{names.noun} component"
    if taken is not None and taken.distribution != names.project:
        raise ConfigValueError(
            f'new-plugin: there is a {what} "{names.name}" already: {taken}.', hint="Choose another name."
        )
