"""KV blocks beyond one engine: a toolkit for stores, connectors, codecs, policies, and engines that work together."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command, CommandGroup, Noun
from trencadis_kv.interfaces import KVCodec, KVPolicy

__all__ = ["NOUNS", "trencadis_commands", "trencadis_nouns"]

_SUMMARIES = {
    "cluster": "Run engines that compute prompts and engines that generate, on this machine.",
    "kv": "Show or verify a directory of KV blocks, or carry it elsewhere as a safetensors file.",
}
"""Summary of each command; the command's module in ``trencadis_kv.commands`` has the same name."""


NOUNS = (
    Noun(
        name="kv_codec",
        hook="trencadis_kv_codecs",
        contract=KVCodec,
        helps="kv_connector",
        suite="trencadis_kv.testing.kv_codec:KVCodecConformance",
        has_none=True,
    ),
    Noun(
        name="kv_policy",
        hook="trencadis_kv_policies",
        contract=KVPolicy,
        default="cost_aware",
        helps="kv_connector",
        suite="trencadis_kv.testing.kv_policy:KVPolicyConformance",
    ),
)
"""What connectors ask for beside a store: the encoding of a block's bytes, and which blocks are worth moving. A connector may make several."""


@hookimpl
def trencadis_nouns() -> Iterable[Noun]:
    """Yield ``kv_codec`` and ``kv_policy``."""
    return NOUNS


@hookimpl
def trencadis_commands() -> Iterable[Command]:
    """Yield ``cluster`` and ``kv``."""
    for name, summary in _SUMMARIES.items():
        module = f"trencadis_kv.commands.{name.replace('-', '_')}"
        yield Command(
            name=name, summary=summary, group=CommandGroup.OPERATING, load=partial(importlib.import_module, module)
        )
