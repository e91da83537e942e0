"""What an engine counted between two readings of its totals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["counted_since"]


def counted_since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences, name by name. Pure.

    Args:
        before: Numbers, and tuples of numbers by position, by name.
        after: The same later; tuples may have become longer.
    """
    counts: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, tuple):
            first = (*before[name], *[0] * (len(value) - len(before[name])))
            counts[name] = tuple(now - then for now, then in zip(value, first, strict=True))
        else:
            counts[name] = value - before[name]
    return counts
