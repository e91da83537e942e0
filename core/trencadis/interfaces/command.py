"""A command of ``trencadis`` as a plugin offers it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import ModuleType

import attrs

__all__ = ["Command", "CommandGroup"]


class CommandGroup(enum.StrEnum):
    """Headings of ``trencadis --help``, in order."""

    RUNNING = "Run a model"
    LOOKING = "See what is here"
    OPERATING = "Operate and size"
    LABORATORY = "Measure and simulate"
    WRITING = "Write plugins"
    OTHER = "Other"


def _check_name(_: object, __: attrs.Attribute[str], name: str) -> None:
    if not name or not name.replace("-", "").isalnum() or name != name.lower() or not name[0].isalpha():
        raise ValueError(f"command name {name!r} must be lower-case letters, digits and hyphens")


@attrs.frozen(kw_only=True)
class Command:
    """A command: its name and summary, for ``trencadis --help``, and a function that imports its module.

    The module has:

    * ``add_arguments(parser: argparse.ArgumentParser) -> None``: adds its own flags, none with a dot in its name;
    * ``run(args: argparse.Namespace, config: Config, registry: Registry) -> int``: runs it and returns the exit code;
      ``args.resolved`` is the ``ResolvedConfig``, for the sources of values;
    * or, in place of ``run``, ``run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int``: neither components nor the
      configuration are loaded for it; ``flags`` are the config flags as given, ``args.config_file`` is the ``ConfigFile``, and
      ``args.plugins`` the ``PluginLoader`` with which the command was found, see :mod:`trencadis.api`;
    * optionally ``SHORT_FLAGS: Mapping[str, str]``: the config flag that each short form stands for;
    * optionally ``TAKES_MODEL: bool``: its first argument, ``MODEL``, stands for ``--model.path``, and is added before its own;
    * optionally ``MAIN_SETTINGS: Sequence[str]``: dotted paths of settings that its ``--help`` shows beside the usual ones;
      ``--help-all`` shows all;
    * optionally ``TAKES_CONFIG = False``: it takes no config flags;
    * optionally ``TERMINAL_LOG_LEVELS: tuple[str, str]``: the level of the log on a terminal, and the level while an engine loads,
      such as ``("info", "warning")``; the command has ``-v`` then, and a level that is set wins;
    * optionally ``NEEDS_ALL_PLUGINS = False``: plugins on demand that nothing in the configuration names are not imported for it;
    * optionally ``CAN_BE_LOCKED = False``: it has no ``--locked``, as it runs several configurations, or none.

    Attributes:
        name: Lower-case with hyphens; unique.
        summary: One line.
        group: Heading under which ``trencadis --help`` lists it.
        load: Imports and returns the module; called once, when the command was chosen.
    """

    name: str = attrs.field(validator=_check_name)
    summary: str
    group: CommandGroup = CommandGroup.OTHER
    load: Callable[[], ModuleType]
