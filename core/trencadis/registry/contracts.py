"""What each noun's factory must return, and which interface version is accepted."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from trencadis.faults import shown
from trencadis.interfaces import (
    AcceptanceRule,
    Backend,
    BucketingStrategy,
    ConnectorPair,
    DraftLength,
    EvictionPolicy,
    Executor,
    KVCodec,
    KVPolicy,
    Observer,
    Router,
    Sampler,
    SchedulingPolicy,
    Speculator,
)
from trencadis.interfaces.component import Stability

__all__ = ["CONTRACTS", "interface_version", "stability_of", "why_refused"]

CONTRACTS: Mapping[str, type[Any]] = {
    "bucketing": BucketingStrategy,
    "scheduling": SchedulingPolicy,
    "eviction": EvictionPolicy,
    "sampling": Sampler,
    "speculation": Speculator,
    "draft_length": DraftLength,
    "acceptance": AcceptanceRule,
    "kv_connector": ConnectorPair,
    "kv_codec": KVCodec,
    "kv_policy": KVPolicy,
    "router": Router,
    "backend": Backend,
    "executor": Executor,
    "observer": Observer,
}
"""Class of what a factory returns, by noun."""


def interface_version(noun: str) -> int:
    """Return the current version of a noun's interface, 1 or more. Pure."""
    version: int = importlib.import_module(f"trencadis.interfaces.{noun}").INTERFACE_VERSION
    return version


def stability_of(noun: str) -> Stability:
    """Return how far plugin authors can rely on a noun's contract. Pure."""
    stability: Stability = importlib.import_module(f"trencadis.interfaces.{noun}").STABILITY
    return stability


def why_refused(noun: str, version: Any) -> str:
    """Return why a component for this interface version cannot be used, or an empty string. Pure.

    The current version alone is accepted.

    Args:
        noun: The component's noun.
        version: What the component states.
    """
    current = interface_version(noun)
    if type(version) is int and version == current:
        return ""
    stated = (
        f"it was written for version {shown(version)} of the {noun} interface, and this Trencadís accepts {current}"
    )
    if type(version) is not int or version < 1:
        return (
            f"{stated}: state the number that trencadis.interfaces.{noun} had as INTERFACE_VERSION when it was written"
        )
    if version > current:
        return f"{stated}: upgrade Trencadís"
    return f"{stated}: upgrade the plugin, or read beside INTERFACE_VERSION in trencadis.interfaces.{noun} what to change in it"
