"""Connector ``filesystem``: blocks as files in a directory, which survive a restart and can be shared by several engines."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import TransferCause
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.filesystem.disk_quota import DiskQuota
from trencadis_kv.store.object_directory import ObjectDirectory
from trencadis_kv.store.store_connector import store_connector

__all__ = ["FilesystemStore", "default_path", "make_filesystem"]

_ORDER_NS: Final = 10**6
"""Difference between the recorded uses of an object and the one before it: the end of a chain is evicted before its beginning."""


def default_path() -> Path:
    """Return ``$XDG_CACHE_HOME/trencadis/kv``, by default ``~/.cache/trencadis/kv``.

    Source: XDG Base Directory Specification: a relative path in the variable counts as none.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "trencadis" / "kv"


def make_filesystem(config: FilesystemConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector over the directory that the config names."""
    path = Path(config.path).expanduser() if config.path else default_path()
    directory = ObjectDirectory(path.absolute(), fsync=config.fsync, trust_others=config.trust_others)
    room = DiskQuota(
        directory,
        max_bytes=config.max_bytes,
        low_water_ratio=config.low_water_ratio,
        min_free_ratio=config.min_free_ratio,
        sweeps=config.saves,
    )
    return store_connector(lambda: FilesystemStore(directory, room), config, context, name="filesystem")


class FilesystemStore(BlockStore):
    """One thread's access to a directory.

    Reads and writes cannot be interrupted: on a local disk they are short, on a network file system that hangs they
    take as long as its mount options say. An interrupt takes effect between two objects.

    Args:
        directory: Directory of the objects.
        room: Quota of the directory; shared by all stores of an engine.
    """

    def __init__(self, directory: ObjectDirectory, room: DiskQuota) -> None:
        self._directory = directory
        self._room = room
        self._is_checked = False
        self._interrupted = False
        self._is_closed = False
        room.opened()

    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys are there.

        Raises:
            TransferError: ``unreachable`` or ``cancelled``.
        """
        self._begin()
        for number, key in enumerate(keys):
            self._go_on()
            if not self._directory.holds(key):
                return number
        return len(keys)

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Read objects; -1 for missing ones.

        Raises:
            TransferError: ``unreachable`` or ``cancelled``.
        """
        self._begin()
        found = []
        for key, target in zip(keys, targets, strict=True):
            self._go_on()
            found.append(self._directory.read_into(key, target))
        return found

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Write objects while there is room; returns how many were written.

        Raises:
            TransferError: ``unreachable`` or ``cancelled``.
        """
        self._begin(writes=True)
        now_ns = time.time_ns()
        for number, (key, pieces) in enumerate(zip(keys, objects, strict=True)):
            self._go_on()
            if not self._room.take(sum(piece.nbytes for piece in pieces)):
                return number
            try:
                self._directory.write(key, pieces, used_ns=now_ns - number * _ORDER_NS)
            except TransferError as error:
                if error.cause != TransferCause.FULL:
                    raise
                self._room.refused(str(error))  # a full disk can still be read, so this is no failure
                return number
        return len(keys)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored.

        Raises:
            TransferError: ``unreachable`` or ``cancelled``.
        """
        self._begin()
        for key in keys:
            self._go_on()
            self._directory.remove(key)

    def interrupt(self) -> None:
        """Make the running call raise at its next object."""
        self._interrupted = True

    def close(self) -> None:
        """Stop a running eviction, if this is the last store of its engine."""
        if not self._is_closed:
            self._is_closed = True
            self._room.closed()

    def _begin(self, *, writes: bool = False) -> None:
        self._interrupted = False
        if (
            writes or not self._is_checked
        ):  # always checked before a write: nothing may be written where a disk is no longer mounted
            self._directory.check()
            self._is_checked = True

    def _go_on(self) -> None:
        if self._interrupted:
            raise TransferError("The KV directory was left in the middle of a call.", cause=TransferCause.CANCELLED)
