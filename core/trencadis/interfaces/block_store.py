"""The store of a KV connector that keeps blocks by key: it moves bytes and decides nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["BlockStore"]


class BlockStore(ABC):
    """One connection to a place that keeps objects by key. Used by one thread at a time; every call may wait.

    What it gives back need not be what was put: objects carry an identity and a checksum that the caller verifies. A call that
    cannot be done raises ``TransferError`` with a cause; the next call tries again, with a new connection if need be.
    """

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys are there, 0 .. len(keys). A block is useless without those before it.

        Args:
            keys: ASCII, at most 200 characters each, of letters, digits and ``/.-_``.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Read objects into memory.

        Args:
            keys: Which.
            targets: Writable bytes, one for each key; an object that is longer counts as not there.

        Returns:
            Bytes of each; -1 for one that is not there.
        """

    @abstractmethod
    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Keep objects; each is there whole or not at all, whatever happens meanwhile.

        Args:
            keys: Keys of the blocks, one each.
            objects: The pieces of each, one after the other.

        Returns:
            How many were kept; a full store keeps fewer.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Forget objects; those that are not there are ignored."""

    @abstractmethod
    def interrupt(self) -> None:
        """Let a call that another thread is waiting in raise soon. From any thread; harmless while no call runs."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection up; may be called twice."""
