"""The command ``trencadis``.

A command is a module with three names, imported only when it is chosen:

* ``SUMMARY: str``: one line for ``trencadis --help``;
* ``add_arguments(parser: argparse.ArgumentParser) -> None``: its own flags, none with a dot in its name;
* ``run(args: argparse.Namespace, config: Config, registry: Registry) -> int``: does it and returns the exit code;
  ``args.resolved`` is the ``ResolvedConfig``, for the sources of values.

Flags of the configuration, ``--table.key``, are derived from the config classes and work with every command.
"""

from __future__ import annotations

from trencadis.cli.main import main

__all__ = ["main"]
