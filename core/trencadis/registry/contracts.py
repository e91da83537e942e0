"""The nouns of the core: what each one's factory must return, and which interface version is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.faults import shown
from trencadis.hookspecs import NOUNS
from trencadis.interfaces import (
    AcceptanceRule,
    Backend,
    BucketingStrategy,
    ConnectorPair,
    DraftLength,
    EvictionPolicy,
    Executor,
    Noun,
    Observer,
    Router,
    Sampler,
    SchedulingPolicy,
    Speculator,
)

__all__ = ["CONTRACTS", "CORE_NOUNS", "why_refused"]

CONTRACTS: Mapping[str, type[Any]] = {
    "bucketing": BucketingStrategy,
    "scheduling": SchedulingPolicy,
    "eviction": EvictionPolicy,
    "sampling": Sampler,
    "speculation": Speculator,
    "draft_length": DraftLength,
    "acceptance": AcceptanceRule,
    "kv_connector": ConnectorPair,
    "router": Router,
    "backend": Backend,
    "executor": Executor,
    "observer": Observer,
}
"""Class of what a factory returns, by noun of the core."""

_HELPS = {"draft_length": "speculation", "acceptance": "speculation"}

CORE_NOUNS: Mapping[str, Noun] = {
    name: Noun(name=name, hook=hook, contract=CONTRACTS[name], helps=_HELPS.get(name, ""))
    for name, hook in NOUNS.items()
}
"""The nouns of the core by name; their defaults are those of ``Config``."""


def why_refused(noun: Noun, version: Any) -> str:
    """Return why a component for this interface version cannot be used, or an empty string. Pure.

    The current version alone is accepted.

    Args:
        noun: The component's noun.
        version: Version that the component states.
    """
    current, module = noun.interface_version, noun.contract.__module__
    if type(version) is int and version == current:
        return ""
    stated = f"it was written for version {shown(version)} of the {noun.name} interface, and this Trencadís accepts {current}"
    if type(version) is not int or version < 1:
        return f"{stated}: state the number that {module} had as INTERFACE_VERSION when it was written"
    if version > current:
        return f"{stated}: upgrade Trencadís"
    return f"{stated}: upgrade the plugin, or read beside INTERFACE_VERSION in {module} what to change in it"
