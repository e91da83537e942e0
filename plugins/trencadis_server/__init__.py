"""The OpenAI-compatible server."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command

__all__ = ["trencadis_commands"]

_SUMMARIES = {
    "serve": "Serve the model over an OpenAI-compatible HTTP API.",
    "run-batch": "Answer a file of requests (OpenAI's batch format), without a server.",
}
"""Of each command, whose module is named as it is."""


@hookimpl
def trencadis_commands() -> Iterable[Command]:
    """Yield ``serve`` and ``run-batch``."""
    for name, summary in _SUMMARIES.items():
        module = f"trencadis_server.commands.{name.replace('-', '_')}"
        yield Command(name=name, summary=summary, load=partial(importlib.import_module, module))
