"""Ghost entries of evicted contents."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["History"]

T = TypeVar("T")


class History(Generic[T]):
    """A bounded table of evicted contents ("ghosts") by key; drops the oldest first. O(1)."""

    def __init__(self) -> None:
        self._facts: OrderedDict[bytes, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._facts)

    def remember(self, key: bytes, fact: T, *, most: float) -> None:
        """Add a value for an evicted content; ignored for an empty key.

        Args:
            key: Key of the content.
            fact: Fact about it.
            most: Contents to remember; older ones are forgotten.
        """
        if key:
            self._facts[key] = fact
            self._facts.move_to_end(key)
        self.shrink(most)

    def shrink(self, most: float) -> None:
        """Drop the oldest entries down to a number."""
        while self._facts and len(self._facts) > most:
            self._facts.popitem(last=False)

    def recall(self, key: bytes) -> T | None:
        """Remove and return the value of a content, or None."""
        return self._facts.pop(key, None)
