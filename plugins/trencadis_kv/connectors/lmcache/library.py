"""Wrapper of the used parts of LMCache: its storage manager, with keys and objects of this project.

LMCache's engine would split prompts into chunks and name them by 64-bit hashes that cover neither tenant nor model
revision. Here the whole key of an object is passed as a tag, which is part of the object's name in every store of
LMCache.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.lmcache.config import LMCacheConfig
from trencadis_kv.connectors.native_calls import AbandonedCalls, NativeCalls

__all__ = ["LMCacheClient", "LMCacheLibrary", "check_package"]

_NAP_S: Final = 0.001
_CLOSE_S: Final = 2.0
_HASH_BYTES: Final = 7
"""Bytes of the hash: LMCache's field is 64 bits wide, with a sign in some stores."""


def check_package() -> None:
    """Check that the package is installed; importing it takes seconds and is left to a thread.

    Raises:
        ConfigError: The package is missing.
    """
    if importlib.util.find_spec("lmcache") is None:
        raise ConfigError(
            "kv_connector.name = 'lmcache' needs the package lmcache, which is not installed.",
            hint="It asks for CUDA builds that it does not need here: see docs/do/kv-connectors.md for the commands.",
        )


class LMCacheLibrary:
    """LMCache's storage manager. From any thread.

    Args:
        config: Table ``[kv_connector.lmcache]``.
    """

    def __init__(self, config: LMCacheConfig) -> None:
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # else LMCache reports usage to its developers
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        self._torch = importlib.import_module("torch")
        self._make_key = importlib.import_module("lmcache.utils").CacheEngineKey
        self._format = importlib.import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
        base = importlib.import_module("lmcache.v1.storage_backend.connector.base_connector")
        self._connector_base = base.RemoteConnector
        self._places = [] if not config.remote_url else ["RemoteBackend"]
        self._manager = self._start(config)

    def holds(self, key: str) -> bool:
        """Return whether an object exists."""
        return self._manager.contains(self._key(key), search_range=self._places or None) is not None

    def read(self, key: str) -> bytes | None:
        """Return a copy of an object, or None."""
        found = self._manager.get(self._key(key))
        if found is None:
            return None
        try:
            return bytes(found.tensor.reshape(-1).view(self._torch.uint8).numpy())
        finally:
            found.ref_count_down()

    def write(self, key: str, data: bytearray) -> bool:
        """Begin to store an object; False if there is no memory for it."""
        shape = self._torch.Size([1, 1, 1, len(data)])
        place = self._manager.allocate(shape, self._torch.uint8, self._format, busy_loop=False)
        if place is None:
            return False
        place.tensor.reshape(-1).copy_(self._torch.frombuffer(data, dtype=self._torch.uint8))
        self._manager.batched_put([self._key(key)], [place])
        return True

    def remove(self, key: str) -> None:
        """Remove an object from the stores that can remove one; it stays in the others, such as Redis'."""
        places = [name for name, place in self._manager.storage_backends.items() if self._removes(place)]
        self._manager.remove(self._key(key), locations=places)

    def close(self) -> None:
        """Stop its threads."""
        self._manager.close()

    def _removes(self, place: Any) -> bool:
        """Return whether a store can remove objects; LMCache logs a traceback for each removal from one that cannot."""
        connection = getattr(place, "connection", None)
        connector = getattr(connection, "_connector", connection)  # the connector inside the wrapper that measures it
        return connector is None or type(connector).remove_sync is not self._connector_base.remove_sync

    def _key(self, key: str) -> Any:
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=_HASH_BYTES).digest(), "big")
        tags = {"lmcache.tag.kv": key.replace("/", "~")}  # "~" is in no key
        return self._make_key("trencadis", 1, 0, number, self._torch.uint8, tags)

    def _start(self, config: LMCacheConfig) -> Any:
        module = "lmcache.v1"
        settings = importlib.import_module(f"{module}.config").LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=not config.remote_url,
            max_local_cpu_size=config.local_bytes / (1 << 30),
            remote_url=config.remote_url or None,
            remote_serde="naive",
        )
        about = importlib.import_module(f"{module}.metadata").LMCacheMetadata(
            model_name="trencadis",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self._torch.uint8,
            kv_shape=(1, 1, 256, 1, 1024),
        )
        events = importlib.import_module(f"{module}.event_manager").EventManager()
        manager = importlib.import_module(f"{module}.storage_backend.storage_manager").StorageManager
        return manager(settings, about, event_manager=events)


class LMCacheClient:
    """Shared instance, started on first use, closed with the last store. From any thread.

    Args:
        config: Table ``[kv_connector.lmcache]``.
    """

    def __init__(self, config: LMCacheConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._num_users = 0
        self._library: LMCacheLibrary | None = None
        self.left = AbandonedCalls(config.max_left_calls)

    def open(self) -> None:
        """Count a store."""
        with self._lock:
            self._num_users += 1

    def library(self) -> LMCacheLibrary:
        """Return the library.

        Raises:
            TransferError: ``unreachable``: it does not start.
        """
        with self._lock:
            if self._library is None:
                try:
                    self._library = LMCacheLibrary(self._config)
                except Exception as error:  # exceptions of many classes, from many packages
                    raise TransferError(
                        f"LMCache does not start: {type(error).__name__}: {error}.",
                        cause=TransferCause.UNREACHABLE,
                        hint="Correct kv_connector.lmcache.remote_url, and see docs/do/kv-connectors.md for what it needs.",
                    ) from error
            return self._library

    def wait_kept(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait until written objects are stored: LMCache stores them asynchronously.

        Raises:
            TransferError: Objects do not appear in time, which LMCache reports nowhere else.
        """
        library, until_s, left = self.library(), time.monotonic() + timeout_s, list(keys)
        while left := [key for key in left if not library.holds(key)]:
            if time.monotonic() > until_s:
                raise TransferError(
                    f"LMCache took {len(keys)} objects, and {len(left)} of them are not there {timeout_s:g} s later.",
                    cause=TransferCause.RAISED,
                    hint="See its log: a package that a store of it needs may be missing, such as aiofiles.",
                )
            time.sleep(_NAP_S)

    def close(self) -> None:
        """Count a closed store; the last one closes the library."""
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._library is None:
                return
            library, self._library = self._library, None
        calls = NativeCalls("trencadis-lmcache-close", left=self.left)
        try:
            calls.run(library.close, timeout_s=_CLOSE_S, what="LMCache")
        except TransferError:
            return  # its threads are daemons
        finally:
            calls.close()
