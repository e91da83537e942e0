"""The command ``trencadis``.

A command is a module with three names, imported only when it is chosen:

* ``SUMMARY: str``: one line for ``trencadis --help``;
* ``add_arguments(parser: argparse.ArgumentParser) -> None``: its own flags, none with a dot in its name;
* ``run(args: argparse.Namespace, config: Config, registry: Registry) -> int``: does it and returns the exit code;
  ``args.resolved`` is the ``ResolvedConfig``, for the sources of values.

A command that must work with a broken plugin or configuration has ``run_alone(args, flags) -> int`` in place of ``run``:
nothing is loaded for it, and ``flags`` are the config flags as given. One that is not configured at all says
``TAKES_CONFIG = False``.

Flags of the configuration, ``--table.key``, are derived from the config classes and work with every other command.
"""

from __future__ import annotations

from trencadis.cli.main import main

__all__ = ["main"]
