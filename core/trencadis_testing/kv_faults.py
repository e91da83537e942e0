"""A store that goes wrong on command, around any other: what KV connectors are tested against.

Faults.begin(FLIPPED, calls={"get"}) ─▶ every FaultyStore of the connector lies ─▶ Faults.end() ─▶ all is well again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum

from trencadis.errors import TransferError
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import TransferCause

__all__ = ["CALLS", "DictStore", "Fault", "Faults", "FaultyStore"]

CALLS = frozenset({"contains", "get", "put", "delete"})
"""Calls of a store that a fault can be in."""

_LONGEST_STALL_S = 30.0
"""A stall ends by then, so that a connector that never interrupts fails its test and does not hang it."""


class Fault(StrEnum):
    """What a store does wrong, and in which calls it shows."""

    NONE = "none"
    CLAIMS = "claims"  # contains: everything is there
    DENIES = "denies"  # contains: nothing is
    GONE = "gone"  # get: not there, although the look-up found it; the first object of a call still is
    FLIPPED = "flipped"  # get: one bit of the payload is another
    HEADER = "header"  # get: one bit of the first 100 bytes is another
    SWAPPED = "swapped"  # get: another key's object, whole and valid
    CUT = "cut"  # get: half of the object; put: the end of it is not kept
    EMPTY = "empty"  # get: there, of no bytes
    FULL = "full"  # put: nothing is kept, and it says so
    HALF = "half"  # put: half of the objects are kept, and it says so
    FORGETS = "forgets"  # put: nothing is kept, and it says that all are
    STALLS = "stalls"  # any: waits until it is interrupted or the fault ends
    SLOW = "slow"  # any: takes some milliseconds more
    REFUSES = "refuses"  # any: TransferError, as for a server that is down
    RAISES = "raises"  # any: an exception that no store should raise


class Faults:
    """What is wrong at the moment, for all stores of a connector. From any thread.

    Attributes:
        num_injected: Calls that went wrong so far.
        slow_s: How much longer a slow call takes.
    """

    def __init__(self) -> None:
        self.num_injected = 0
        self.slow_s = 0.005
        self._fault = Fault.NONE
        self._calls: frozenset[str] = CALLS
        self._every = 1
        self._num_calls = 0
        self._keys: dict[str, None] = {}
        self._changed = threading.Condition()

    def begin(self, fault: Fault, *, calls: Iterable[str] = CALLS, every: int = 1) -> None:
        """Let calls go wrong from now on, until the next ``begin`` or :meth:`end`.

        Args:
            fault: How.
            calls: Which; a fault that a call does not know leaves it alone.
            every: Only each n-th of them.
        """
        with self._changed:
            self._fault, self._calls, self._every, self._num_calls = fault, frozenset(calls), every, 0
            self._changed.notify_all()

    def end(self) -> None:
        """Let all be well again; calls that stall go on."""
        self.begin(Fault.NONE)

    def of(self, call: str) -> Fault:
        """Return what is wrong with a call that begins now."""
        with self._changed:
            if self._fault is Fault.NONE or call not in self._calls:
                return Fault.NONE
            self._num_calls += 1
            if self._num_calls % self._every:
                return Fault.NONE
            self.num_injected += 1
            return self._fault

    def saw(self, keys: Iterable[str]) -> None:
        """Remember keys that were put: what ``SWAPPED`` reads from."""
        with self._changed:
            self._keys.update(dict.fromkeys(keys))

    def another(self, key: str) -> str:
        """Return another key of the same engine, so that only the block's own identity differs; the key itself if there is none."""
        with self._changed:
            prefix = key.rsplit("/", 1)[0]
            return next((other for other in self._keys if other != key and other.startswith(prefix)), key)

    def stall(self, interrupted: threading.Event) -> bool:
        """Wait while calls stall; True if that ended because of an interruption."""
        until_s = time.monotonic() + _LONGEST_STALL_S
        with self._changed:
            while self._fault is Fault.STALLS and not interrupted.is_set() and time.monotonic() < until_s:
                self._changed.wait(0.5)
        return interrupted.is_set()

    def wake(self) -> None:
        """Let calls that stall look whether they were interrupted."""
        with self._changed:
            self._changed.notify_all()


class FaultyStore(BlockStore):
    """Another store, with faults.

    Args:
        inner: The store.
        faults: Shared by all stores of a connector.
    """

    def __init__(self, inner: BlockStore, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._interrupted = threading.Event()
        self._is_busy = False

    def contains(self, keys: Sequence[str]) -> int:
        """Ask the store, or lie."""
        fault = self._begin("contains")
        if fault is Fault.CLAIMS:
            return len(keys)
        return 0 if fault is Fault.DENIES else self._inner.contains(keys)

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Read from the store, and spoil what came."""
        fault = self._begin("get")
        if fault is Fault.SWAPPED:
            keys = [self._faults.another(key) for key in keys]
        sizes = list(self._inner.get(keys, targets))
        for index, target in enumerate(targets):
            if sizes[index] > 0:
                sizes[index] = _spoiled(fault, target[: sizes[index]], is_first=index == 0 and len(targets) > 1)
        return sizes

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Write to the store, or to less of it."""
        fault = self._begin("put")
        if fault is Fault.FULL:
            return 0
        if fault is Fault.FORGETS:
            return len(keys)
        if fault is Fault.HALF:
            keys, objects = keys[: len(keys) // 2], objects[: len(keys) // 2]
        if fault is Fault.CUT:
            objects = [[*pieces[:-1], pieces[-1][: len(pieces[-1]) // 2]] for pieces in objects]
        self._faults.saw(keys)
        return self._inner.put(keys, objects) if keys else 0

    def delete(self, keys: Sequence[str]) -> None:
        """Delete in the store."""
        self._begin("delete")
        self._inner.delete(keys)

    def interrupt(self) -> None:
        """Wake a call that stalls, and the store's own."""
        if self._is_busy:
            self._interrupted.set()
            self._faults.wake()
        self._inner.interrupt()

    def close(self) -> None:
        """Close the store."""
        self._interrupted.set()
        self._faults.wake()
        self._inner.close()

    def _begin(self, call: str) -> Fault:
        fault = self._faults.of(call)
        if fault is Fault.REFUSES:
            raise TransferError(f"The store refuses to {call}, as it was told.", cause=TransferCause.UNREACHABLE)
        if fault is Fault.RAISES:
            raise RuntimeError(f"a store that raises in {call}, as it was told")
        if fault is Fault.SLOW:
            time.sleep(self._faults.slow_s)
        if fault is Fault.STALLS:
            self._is_busy = True
            try:
                if self._faults.stall(self._interrupted):
                    self._interrupted.clear()
                    raise TransferError(f"A stalled {call} was interrupted.", cause=TransferCause.DEADLINE)
            finally:
                self._is_busy = False
        return fault


class DictStore(BlockStore):
    """Objects in a dictionary, shared by all stores that are given the same one; the simplest store that is right.

    Args:
        objects: By key.
        max_objects: A full store keeps no new ones.
    """

    def __init__(self, objects: dict[str, bytes], *, max_objects: int = 1 << 30) -> None:
        self._objects = objects
        self._max_objects = max_objects

    def contains(self, keys: Sequence[str]) -> int:
        """Count leading keys that are there."""
        return next((index for index, key in enumerate(keys) if key not in self._objects), len(keys))

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Copy objects out."""
        sizes = []
        for key, target in zip(keys, targets, strict=True):
            found = self._objects.get(key)
            if found is None or len(found) > len(target):
                sizes.append(-1)
                continue
            target[: len(found)] = found
            sizes.append(len(found))
        return sizes

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Copy objects in, while there is room."""
        num_kept = 0
        for key, pieces in zip(keys, objects, strict=True):
            if key in self._objects or len(self._objects) < self._max_objects:
                self._objects[key] = b"".join(pieces)
                num_kept += 1
        return num_kept

    def delete(self, keys: Sequence[str]) -> None:
        """Drop objects."""
        for key in keys:
            self._objects.pop(key, None)

    def interrupt(self) -> None:
        """Nothing here waits."""

    def close(self) -> None:
        """Nothing to give up."""


def _spoiled(fault: Fault, found: memoryview, *, is_first: bool) -> int:
    """Spoil an object in place, and return how long it is said to be."""
    if fault is Fault.GONE:
        return len(found) if is_first else -1
    if fault is Fault.CUT:
        return len(found) // 2
    if fault is Fault.EMPTY:
        return 0
    if fault is Fault.FLIPPED:
        found[-1] ^= 1
    if fault is Fault.HEADER:
        found[min(len(found) - 1, 20)] ^= 1
    return len(found)
