"""KV blocks beyond one engine: a toolkit for stores, connectors, codecs, policies, and engines that work together."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command, CommandGroup

__all__ = ["trencadis_commands"]

_SUMMARIES = {
    "cluster": "Run engines that compute prompts and engines that generate, on this machine.",
    "kv": "Show or verify a directory of KV blocks, or carry it elsewhere as a safetensors file.",
}
"""Summary of each command; the command's module in ``trencadis_kv.commands`` has the same name."""


@hookimpl
def trencadis_commands() -> Iterable[Command]:
    """Yield ``cluster`` and ``kv``."""
    for name, summary in _SUMMARIES.items():
        module = f"trencadis_kv.commands.{name.replace('-', '_')}"
        yield Command(
            name=name, summary=summary, group=CommandGroup.OPERATING, load=partial(importlib.import_module, module)
        )
