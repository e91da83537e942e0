"""KV blocks in the memory of several engines, shared through a Mooncake store: one object per block.

Source: Mooncake, ``mooncake-store/include/types.h``; trials with 0.3.13 showed which code it returns when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import TransferCause
from trencadis_kv.connectors.mooncake.client import MooncakeClient, check_package, replication
from trencadis_kv.connectors.mooncake.config import MooncakeConfig
from trencadis_kv.connectors.native_calls import AbandonedCalls, NativeCalls
from trencadis_kv.store.bounded import BoundedDict
from trencadis_kv.store.store_connector import store_connector

__all__ = [
    "ABSENT",
    "EXISTS",
    "FULL",
    "MISSING",
    "BadKeys",
    "IOWorker",
    "MooncakeStore",
    "make_mooncake",
    "mooncake_stores",
    "transfer_error",
]

FULL: Final = -200
"""Code: no memory for an object."""
MISSING: Final = -704
EXISTS: Final = -705
ABSENT: Final = frozenset({MISSING, -600, -702, -703, -707, -710, -712, -800})
"""Codes: no object, one that is too long or incomplete, or one whose holder is gone or slow."""

_MASTER: Final = range(-1099, -899)


def transfer_error(code: int, master: str) -> TransferError:
    """Return the transfer error for a code of the library. Pure.

    Args:
        code: Code of the library, negative.
        master: Address of the master.
    """
    if code in _MASTER:
        return TransferError(
            f"The Mooncake master at {master} does not answer (code {code}).",
            cause=TransferCause.UNREACHABLE,
            hint="Start mooncake_master there, or correct kv_connector.mooncake.master.",
        )
    return TransferError(f"Mooncake returned code {code}.", cause=TransferCause.RAISED)


T = TypeVar("T")
_MAX_BAD: Final = 1 << 16


class IOWorker:
    """A registered buffer and the calls that use it. One caller at a time.

    Args:
        library: Client object of the library.
        num_bytes: Size of the buffer, bytes.
        left: Counter of abandoned calls.

    Attributes:
        data: Buffer, uint8 ``[num_bytes]``; must not be accessed after a call was abandoned.
        address: Address of the first byte of ``data``.
    """

    def __init__(self, library: Any, num_bytes: int, *, left: AbandonedCalls) -> None:
        self._library = library
        self._is_registered = False
        self.data = np.empty(num_bytes, np.uint8)
        self.address = int(self.data.ctypes.data)
        self._calls = NativeCalls("trencadis-mooncake", left=left, on_end=self._forget)

    @property
    def is_left(self) -> bool:
        """True once a call that uses the buffer was abandoned."""
        return self._calls.is_left

    def run(self, call: Callable[[Any], T], *, timeout_s: float) -> T:
        """Return the result of a call of the library; see :meth:`NativeCalls.run`."""

        def on_thread() -> T:
            self._register()
            return call(self._library)

        return self._calls.run(on_thread, timeout_s=timeout_s, what="Mooncake")

    def interrupt(self) -> None:
        """Abandon the running call. From any thread."""
        self._calls.interrupt()

    def close(self) -> None:
        """Free the buffer once nothing writes to it."""
        self._calls.close()

    def _register(self) -> None:
        if self._is_registered:
            return
        code = self._library.register_buffer(self.address, self.data.nbytes)
        if code != 0:
            raise TransferError(f"Mooncake registers no memory: code {code}.", cause=TransferCause.RAISED)
        self._is_registered = True

    def _forget(self) -> None:
        if self._is_registered:
            self._library.unregister_buffer(self.address)
            self._is_registered = False


class BadKeys:
    """Keys that exist in the store with unusable objects. Shared by the stores of a connector; from any thread.

    An object that is being read cannot always be deleted, one whose holder died stays listed for some seconds, and a put keeps the
    old value of a key: such a key counts as absent until it was overwritten.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: BoundedDict[str, None] = BoundedDict(_MAX_BAD)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """Add a key."""
        with self._lock:
            self._keys[key] = None

    def discard(self, key: str) -> None:
        """Remove a key: it was written anew or deleted."""
        with self._lock:
            self._keys.pop(key, None)


class MooncakeStore(BlockStore):
    """One thread's access to the pool.

    Args:
        client: Client shared by all stores of the connector.
        bad: Keys with unusable objects, shared by all stores of the connector.
        config: Table ``[kv_connector.mooncake]``.
    """

    def __init__(self, client: MooncakeClient, bad: BadKeys, config: MooncakeConfig) -> None:
        self._client = client
        self._bad = bad
        self._config = config
        self._io_worker: IOWorker | None = None
        self._is_closed = False
        client.open()

    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys are there.

        Raises:
            TransferError: ``unreachable``, ``deadline`` or ``cancelled``.
        """
        if not keys:
            return 0
        found = self._call(lambda library: library.batch_is_exist(list(keys)))
        for number, (key, code) in enumerate(zip(keys, found, strict=True)):
            if code < 0:
                raise transfer_error(code, self._config.master)
            if not code or key in self._bad:
                return number
        return len(keys)

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Read objects through the store's own buffer, so that a read that ends late cannot write to reused memory.

        Raises:
            TransferError: ``unreachable``, ``deadline`` or ``cancelled``.
        """
        sizes: list[int] = []
        for some in _groups([len(target) for target in targets], self._config.buffer_bytes):
            sizes += self._get(keys[some], targets[some])
        return sizes

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Store objects; stops when the pool is full.

        Raises:
            TransferError: ``unreachable``, ``deadline`` or ``cancelled``.
        """
        num_kept = 0
        sizes = [sum(piece.nbytes for piece in pieces) for pieces in objects]
        for some in _groups(sizes, self._config.buffer_bytes):
            kept = self._put(keys[some], objects[some], sizes[some])
            num_kept += kept
            if kept < len(keys[some]):
                break
        return num_kept

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that cannot be removed now is treated as missing.

        Raises:
            TransferError: ``unreachable``, ``deadline`` or ``cancelled``.
        """
        if not keys:
            return
        for key, code in zip(keys, self._call(lambda library: library.batch_remove(list(keys), True)), strict=True):
            if code in (0, MISSING):
                self._bad.discard(key)
            else:
                self._bad.add(key)

    def interrupt(self) -> None:
        """Abandon a call that another thread waits for."""
        io_worker = self._io_worker
        if io_worker is not None:
            io_worker.interrupt()

    def close(self) -> None:
        """Free the memory."""
        if self._is_closed:
            return
        self._is_closed = True
        io_worker, self._io_worker = self._io_worker, None
        if io_worker is not None:
            io_worker.close()
        self._client.close()

    def _get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> list[int]:
        sizes = [len(target) for target in targets]
        io_worker, offsets = self._room(sizes)
        addresses = [io_worker.address + offset for offset in offsets]
        found = self._call(lambda library: library.batch_get_into(list(keys), addresses, sizes))
        data = io_worker.data.data
        result = []
        for key, code, target, offset in zip(keys, found, targets, offsets, strict=True):
            if code >= 0:
                target[:code] = data[offset : offset + code]
            elif code not in ABSENT:
                raise transfer_error(code, self._config.master)
            elif code != MISSING:
                self._bad.add(key)
            result.append(max(code, -1))
        return result

    def _put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]], sizes: Sequence[int]) -> int:
        io_worker, offsets = self._room(sizes)
        data = io_worker.data.data
        for pieces, offset in zip(objects, offsets, strict=True):
            at = offset
            for piece in pieces:
                data[at : at + piece.nbytes] = piece
                at += piece.nbytes
        copies = replication(self._config.num_replicas)
        for are_bad in (False, True):
            some = [i for i, key in enumerate(keys) if (key in self._bad) == are_bad]
            if not some:
                continue
            words = [keys[i] for i in some], [io_worker.address + offsets[i] for i in some], [sizes[i] for i in some]
            how = "batch_upsert_from" if are_bad else "batch_put_from"
            codes = self._call(lambda library, how=how, words=words: getattr(library, how)(*words, copies))  # type: ignore[misc]
            if not self._are_kept(words[0], codes):
                return 0
        return len(keys)

    def _are_kept(self, keys: Sequence[str], codes: Sequence[int]) -> bool:
        """Return whether all objects were stored; a part of a failed group may have been stored as well."""
        are_whole = True
        for key, code in zip(keys, codes, strict=True):
            if code in (0, EXISTS):
                self._bad.discard(key)
            elif code in ABSENT or code == FULL:
                are_whole = False
            else:
                raise transfer_error(code, self._config.master)
        return are_whole

    def _room(self, sizes: Sequence[int]) -> tuple[IOWorker, list[int]]:
        """Return an I/O worker whose buffer fits the objects, and the place of each."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += size
        return self._find_lane(end), offsets

    def _find_lane(self, num_bytes: int = 0) -> IOWorker:
        if self._is_closed:
            raise TransferError("The connection to Mooncake was closed.", cause=TransferCause.CANCELLED)
        io_worker = self._io_worker
        if io_worker is not None and (io_worker.is_left or io_worker.data.nbytes < num_bytes):
            io_worker.close()
            io_worker = None
        if io_worker is None:
            size = max(num_bytes, self._config.buffer_bytes)
            io_worker = self._io_worker = IOWorker(self._client.library(), size, left=self._client.left)
        return io_worker

    def _call(self, call: Callable[[Any], T]) -> T:
        return self._find_lane().run(call, timeout_s=self._config.io_timeout_s)


def _groups(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Yield slices of items with a total size of at most ``most``, or single ones. Pure."""
    first = num_bytes = 0
    for at, size in enumerate(sizes):
        if at > first and num_bytes + size > most:
            yield slice(first, at)
            first, num_bytes = at, 0
        num_bytes += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def make_mooncake(config: MooncakeConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector over the pool of the configured master; connects on first use.

    Raises:
        ConfigError: The package mooncake is missing, or a library that it needs.
    """
    return store_connector(mooncake_stores(config), config, context, name="mooncake")


def mooncake_stores(config: MooncakeConfig) -> Callable[[], MooncakeStore]:
    """Return the factory of stores, one per thread; raises as :func:`make_mooncake`."""
    check_package()
    client, bad = MooncakeClient(config), BadKeys()
    return lambda: MooncakeStore(client, bad, config)
