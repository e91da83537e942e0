"""Mappings and sets of bounded size that evict the oldest entry."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

__all__ = ["BoundedDict", "RecentHashes"]

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V], Generic[K, V]):
    """A dictionary of bounded size; evicts the entry that was set longest ago.

    Args:
        max_entries: Maximum number of entries.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._max_entries:
            self.popitem(last=False)


class RecentHashes:
    """Hashes of blocks that were recently handed to a store. From any thread.

    Args:
        max_entries: Maximum number of hashes.
    """

    def __init__(self, max_entries: int) -> None:
        self._lock = threading.Lock()
        self._hashes: BoundedDict[bytes, None] = BoundedDict(max_entries)

    def unknown(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the indices of hashes that are not recent."""
        with self._lock:
            return [i for i, block_hash in enumerate(hashes) if block_hash not in self._hashes]

    def add(self, hashes: Iterable[bytes]) -> None:
        """Add hashes."""
        with self._lock:
            for block_hash in hashes:
                self._hashes[block_hash] = None

    def discard(self, hashes: Iterable[bytes]) -> None:
        """Remove hashes of blocks that the store does not have, so that they are saved again."""
        with self._lock:
            for block_hash in hashes:
                self._hashes.pop(block_hash, None)
