"""The OpenAI-compatible server."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command, ConfigTable, HealthCheck

__all__ = ["trencadis_commands", "trencadis_health_checks", "trencadis_tables"]

_SUMMARIES = {
    "serve": "Serve the model over an OpenAI-compatible HTTP API.",
    "run-batch": "Answer a file of requests (OpenAI's batch format), without a server.",
    "explain": "Show why a request was scheduled or not, step by step; asks a server that runs.",
}
"""Of each command, whose module is named as it is."""


@hookimpl
def trencadis_commands() -> Iterable[Command]:
    """Yield ``serve``, ``run-batch`` and ``explain``."""
    for name, summary in _SUMMARIES.items():
        module = f"trencadis_server.commands.{name.replace('-', '_')}"
        yield Command(name=name, summary=summary, load=partial(importlib.import_module, module))


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
