"""Backends and executors seen with their optional calls, by tests that call these only where they are there."""

from __future__ import annotations

from abc import ABC
from typing import cast

from trencadis.interfaces import (
    Backend,
    Executor,
    SupportsDeferredWarmUp,
    SupportsEmbedding,
    SupportsKVConnector,
    SupportsKVPool,
    SupportsSwapping,
)

__all__ = ["FullBackend", "FullExecutor", "full_backend", "full_executor"]


class FullBackend(Backend, SupportsEmbedding, SupportsSwapping, SupportsDeferredWarmUp, SupportsKVPool, ABC):
    """Type of a backend that has every optional call."""


class FullExecutor(Executor, SupportsEmbedding, SupportsSwapping, SupportsDeferredWarmUp, SupportsKVConnector, ABC):
    """Type of an executor that has every optional call."""


def full_backend(backend: Backend) -> FullBackend:
    """Return the same backend; a call that it lacks raises ``AttributeError``."""
    return cast("FullBackend", backend)


def full_executor(executor: Executor) -> FullExecutor:
    """Return the same executor; a call that it lacks raises ``AttributeError``."""
    return cast("FullExecutor", executor)
