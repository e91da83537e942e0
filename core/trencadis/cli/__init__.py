"""The command ``trencadis``.

Commands of the core are listed in :mod:`trencadis.cli.main`; plugins add theirs by the hook ``trencadis_commands``. See
:class:`~trencadis.interfaces.Command` for what a command's module has; it is imported only when its command is chosen.

Flags of the configuration, ``--table.key``, are derived from the config classes and work with every other command.
"""

from __future__ import annotations

from trencadis.cli.main import main

__all__ = ["main"]
