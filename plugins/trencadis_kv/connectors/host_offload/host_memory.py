"""Objects in host memory, with an eviction policy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trencadis.clock import Clock
from trencadis.errors import ContractError
from trencadis.interfaces import EvictionPolicy
from trencadis.interfaces.block_store import BlockStore

__all__ = ["HostMemory", "HostStore"]


@attrs.define(eq=False)
class _Object:
    number: int
    depth: int
    data: NDArray[np.uint8]


class HostMemory:
    """Objects by key, up to a number of bytes. From any thread.

    The eviction policy gets the same calls as in an engine: an object counts as a block that is in use while it is read
    or written, and as a candidate otherwise. Its depth is its index within a call, and its salt is empty.

    Args:
        capacity_bytes: Maximum bytes of all objects.
        eviction: Eviction policy that chooses the objects to evict; not shared.
        clock: The engine's clock.
    """

    def __init__(self, capacity_bytes: int, *, eviction: EvictionPolicy, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity_bytes
        self._eviction = eviction
        self._clock = clock
        self._objects: dict[str, _Object] = {}
        self._key_of: dict[int, str] = {}
        self._numbers = itertools.count()
        self._num_bytes = 0
        self._num_stores = 0
        self._on_change: Callable[[str, bool], None] = _ignore

    @property
    def num_bytes(self) -> int:
        """Bytes of all objects."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._objects)

    def watch(self, on_change: Callable[[str, bool], None]) -> None:
        """Set a callback ``on_change(key, is_there)`` for each object that comes or goes from now on; it must not wait."""
        self._on_change = on_change

    def opened(self) -> None:
        """Count a store."""
        with self._lock:
            self._num_stores += 1

    def closed(self) -> None:
        """Count a closed store; the last one frees all objects."""
        with self._lock:
            self._num_stores -= 1
            if not self._num_stores:
                for key in list(self._objects):
                    self._delete(key)

    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys are there."""
        with self._lock:
            return sum(1 for _ in itertools.takewhile(self._objects.__contains__, keys))

    def get(self, keys: Sequence[str]) -> list[NDArray[np.uint8] | None]:
        """Return objects, and mark them as used."""
        with self._lock:
            found = [self._objects.get(key) for key in keys]
            used = list({one.number: one for one in found if one is not None}.values())
            if used:
                now_s = self._clock.now_s()
                self._eviction.on_hit([one.number for one in used], now_s=now_s)
                self._use(used, now_s)
            return [None if one is None else one.data for one in found]

    def put(self, key: str, data: NDArray[np.uint8], *, depth: int) -> bool:
        """Store an object, replacing an older one; False if it is larger than the memory. ``data`` must not change afterwards."""
        with self._lock:
            self._delete(key)
            if len(data) > self._capacity:
                return False
            self._make_room(len(data))
            one = self._objects[key] = _Object(next(self._numbers), depth, data)
            self._key_of[one.number] = key
            self._num_bytes += len(data)
            self._on_change(key, True)
            self._use([one], self._clock.now_s())
            return True

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        with self._lock:
            for key in keys:
                self._delete(key)

    def _use(self, used: Sequence[_Object], now_s: float) -> None:
        numbers, depths = [one.number for one in used], [one.depth for one in used]
        contents = [self._key_of[number].encode() for number in numbers]
        self._eviction.on_use(numbers, keys=contents, depths=depths, salt="", now_s=now_s)
        self._eviction.on_free(numbers[::-1], depths=depths[::-1], now_s=now_s)

    def _delete(self, key: str) -> None:
        one = self._objects.get(key)
        if one is not None:
            self._eviction.forget([one.number])
            self._drop(one.number)

    def _make_room(self, num_bytes: int) -> None:
        while self._num_bytes + num_bytes > self._capacity:
            for number in self._eviction.victims(1):
                self._drop(number)

    def _drop(self, number: int) -> None:
        key = self._key_of.pop(number, None)
        if key is None:
            raise ContractError(
                f"The eviction policy {type(self._eviction).__name__} names block {number}, which is no candidate."
            )
        self._num_bytes -= self._objects.pop(key).data.nbytes
        self._on_change(key, False)


class HostStore(BlockStore):
    """One thread's access to the memory; its calls do not block.

    Args:
        memory: Host memory that all threads share.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._is_closed = False
        memory.opened()

    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys are there."""
        return self._memory.contains(keys)

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Copy objects out."""
        sizes = []
        for data, target in zip(self._memory.get(keys), targets, strict=True):
            if data is None or len(data) > len(target):
                sizes.append(-1)
                continue
            np.frombuffer(target, np.uint8)[: len(data)] = data
            sizes.append(len(data))
        return sizes

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Copy objects in; the copies are made before the lock is taken."""
        copies = [_copy(pieces) for pieces in objects]
        return sum(self._memory.put(key, data, depth=i) for i, (key, data) in enumerate(zip(keys, copies, strict=True)))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        self._memory.delete(keys)

    def interrupt(self) -> None:
        """Do nothing: no call blocks."""

    def close(self) -> None:
        """Release the memory; called by each thread of a connector when it is closed; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._memory.closed()


def _ignore(key: str, is_there: bool) -> None:
    pass


def _copy(pieces: Sequence[memoryview]) -> NDArray[np.uint8]:
    """Return the concatenated pieces; NumPy copies without holding the GIL."""
    copy = np.empty(sum(piece.nbytes for piece in pieces), np.uint8)
    start = 0
    for piece in pieces:
        copy[start : start + piece.nbytes] = np.frombuffer(piece, np.uint8)
        start += piece.nbytes
    return copy
