"""Differences of an engine's counters between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["counted_since"]


def counted_since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``after`` minus ``before`` for each name. Pure.

    Args:
        before: Earlier counters by name: numbers, or tuples of numbers.
        after: Later counters by name; tuples may be longer than before.
    """
    counts: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, tuple):
            first = (*before[name], *[0] * (len(value) - len(before[name])))
            counts[name] = tuple(now - then for now, then in zip(value, first, strict=True))
        else:
            counts[name] = value - before[name]
    return counts
