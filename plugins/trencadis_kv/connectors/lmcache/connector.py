"""KV blocks in the stores of LMCache, one object each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import TransferCause
from trencadis_kv.connectors.lmcache.config import LMCacheConfig
from trencadis_kv.connectors.lmcache.library import LMCacheClient, LMCacheLibrary, check_package
from trencadis_kv.connectors.native_calls import NativeCalls
from trencadis_kv.store.store_connector import store_connector

__all__ = ["LMCacheStore", "lmcache_stores", "make_lmcache"]

T = TypeVar("T")


class LMCacheStore(BlockStore):
    """One thread's access to LMCache; its calls use buffers of their own, since they cannot be interrupted.

    Args:
        client: Client shared by all stores of the connector.
        config: Table ``[kv_connector.lmcache]``.
    """

    def __init__(self, client: LMCacheClient, config: LMCacheConfig) -> None:
        self._client = client
        self._config = config
        self._calls = self._new_calls()
        self._is_closed = False
        client.open()

    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys are there.

        Raises:
            TransferError: ``unreachable``, ``deadline`` or ``cancelled``.
        """

        def ask(library: LMCacheLibrary) -> int:
            for number, key in enumerate(keys):
                if not library.holds(key):
                    return number
            return len(keys)

        return self._call(ask)

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Read objects.

        Raises:
            TransferError: ``unreachable``, ``deadline`` or ``cancelled``.
        """
        found = self._call(lambda library: [library.read(key) for key in keys])
        sizes = []
        for data, target in zip(found, targets, strict=True):
            fits = data is not None and len(data) <= len(target)
            if data is not None and fits:
                target[: len(data)] = data
            sizes.append(len(data) if data is not None and fits else -1)
        return sizes

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Store objects while there is memory; returns when they are there.

        Raises:
            TransferError: ``unreachable``, ``deadline``, ``cancelled``; ``raised``: LMCache accepted objects that it
                does not hold.
        """
        copies = [bytearray().join(pieces) for pieces in objects]
        timeout_s = self._config.io_timeout_s

        def write(library: LMCacheLibrary) -> int:
            kept = []
            for key, data in zip(keys, copies, strict=True):
                if not library.write(key, data):
                    break
                kept.append(key)
            self._client.wait_kept(kept, timeout_s / 2)
            return len(kept)

        return self._call(write)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects.

        Raises:
            TransferError: ``unreachable``, ``deadline`` or ``cancelled``.
        """

        def remove(library: LMCacheLibrary) -> None:
            for key in keys:
                library.remove(key)

        self._call(remove)

    def interrupt(self) -> None:
        """Abandon a call that another thread waits for."""
        self._calls.interrupt()

    def close(self) -> None:
        """Close the connection; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._calls.close()
        self._client.close()

    def _call(self, call: Callable[[LMCacheLibrary], T]) -> T:
        if self._is_closed:
            raise TransferError("The connection to LMCache was closed.", cause=TransferCause.CANCELLED)
        if self._calls.is_left:
            self._calls = self._new_calls()
        library = self._client.library()
        return self._calls.run(lambda: call(library), timeout_s=self._config.io_timeout_s, what="LMCache")

    def _new_calls(self) -> NativeCalls:
        return NativeCalls("trencadis-lmcache", left=self._client.left)


def make_lmcache(config: LMCacheConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector over LMCache; connects on first use.

    Raises:
        ConfigError: The package lmcache is missing.
    """
    return store_connector(lmcache_stores(config), config, context, name="lmcache")


def lmcache_stores(config: LMCacheConfig) -> Callable[[], LMCacheStore]:
    """Return the factory of stores, one per thread; raises as :func:`make_lmcache`."""
    check_package()
    client = LMCacheClient(config)
    return lambda: LMCacheStore(client, config)
