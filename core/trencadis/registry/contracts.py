"""What each noun's factory must return, and which interface versions are accepted."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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
from trencadis.registry.kv_connector_1 import from_version_1

__all__ = ["ADAPTERS", "CONTRACTS", "interface_version", "stability_of", "why_refused"]

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

ADAPTERS: Mapping[tuple[str, int], Callable[[Any], Any]] = {("kv_connector", 1): from_version_1}
"""By noun and interface version, the function that makes what a factory of that version returns one of the current version."""


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

    The current version N and N - 1 are accepted.

    Args:
        noun: The component's noun.
        version: What the component states.
    """
    current = interface_version(noun)
    accepted = [str(number) for number in (current - 1, current) if number >= 1]
    if str(version) in accepted and type(version) is int:
        return ""
    stated = f"it was written for version {shown(version)} of the {noun} interface, and this Trencadís accepts {' and '.join(accepted)}"
    if type(version) is not int or version < 1:
        return f"{stated}: state the INTERFACE_VERSION of trencadis.interfaces.{noun} it was written for"
    return f"{stated}: upgrade {'Trencadís' if version > current else 'the plugin'}"
