"""The OpenAI-compatible server."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command, CommandGroup, ConfigTable, HealthCheck

__all__ = ["trencadis_commands", "trencadis_health_checks", "trencadis_tables"]

_COMMANDS = {
    "serve": (CommandGroup.RUNNING, "Serve the model over an OpenAI-compatible HTTP API."),
    "run-batch": (CommandGroup.OPERATING, "Answer a file of requests (OpenAI's batch format), without a server."),
    "explain": (
        CommandGroup.OPERATING,
        "Show why a request was scheduled or not, step by step; asks a server that runs.",
    ),
}
"""Group and summary of each command by name; its module has its name."""


@hookimpl
def trencadis_commands() -> Iterable[Command]:
    """Yield ``serve``, ``run-batch`` and ``explain``."""
    for name, (group, summary) in _COMMANDS.items():
        module = f"trencadis_server.commands.{name.replace('-', '_')}"
        yield Command(name=name, summary=summary, group=group, load=partial(importlib.import_module, module))


@hookimpl
def trencadis_tables() -> Iterable[ConfigTable]:
    """Yield ``[server]``."""
    from trencadis_server.config import ServerConfig

    yield ConfigTable(name="server", config=ServerConfig)


@hookimpl
def trencadis_health_checks() -> Iterable[HealthCheck]:
    """Yield the check of ports and keys."""
    from trencadis_server.health_check import check_server

    yield HealthCheck(name="server", run=check_server)
