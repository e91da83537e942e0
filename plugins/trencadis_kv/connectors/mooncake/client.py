"""Client of a Mooncake store, shared by all threads of a connector.

The library holds the GIL while a client is set up, up to ten minutes if the master does not answer, and while a client
is closed. So a setup is tried in another process first, and a client is closed only if the master has just answered.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import Any, Final

from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.mooncake.config import MooncakeConfig
from trencadis_kv.connectors.native_calls import AbandonedCalls, NativeCalls

__all__ = ["MooncakeClient", "check_package"]

logger = logging.getLogger("trencadis.kv.mooncake")

_SMALLEST_BYTES: Final = 16 << 20
"""Size of the library's own buffer, which this module does not use."""
_TRY: Final = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
code = MooncakeDistributedStore().setup(*json.loads(sys.argv[1]))
os._exit(0 if code == 0 else 3)
"""
_CLOSE_S: Final = 0.5


def check_package() -> None:
    """Import the package.

    Raises:
        ConfigError: The package, or a system library that it needs, is missing.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it logs a page at every setup; set the variable to see it
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        library = "libibverbs" in str(error) or "librdmacm" in str(error)
        raise ConfigError(
            f"kv_connector.name = 'mooncake' needs the package mooncake, which cannot be imported: {error}.",
            hint=(
                "Install the system's RDMA libraries, which it needs for TCP too: apt-get install libibverbs1 librdmacm1."
                if library
                else 'Run pip install "trencadis[mooncake]", or install the package for your device: they exclude each other.'
            ),
        ) from error


class MooncakeClient:
    """Shared client, set up on first use, closed with the last store. From any thread.

    Args:
        config: Table ``[kv_connector.mooncake]``.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._num_users = 0
        self._library: Any = None
        self.left = AbandonedCalls(config.max_left_calls)

    def open(self) -> None:
        """Count a store."""
        with self._lock:
            self._num_users += 1

    def library(self) -> Any:
        """Return the library's client.

        Raises:
            TransferError: ``unreachable``: the master does not answer.
        """
        with self._lock:
            if self._library is None:
                self._library = self._set_up()
            return self._library

    def close(self) -> None:
        """Count a closed store; the last one closes the client, and the pool loses the objects in its memory."""
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._library is None:
                return
            library, self._library = self._library, None
        calls = NativeCalls("trencadis-mooncake-close", left=self.left)
        try:
            calls.run(lambda: library.is_exist("kv1"), timeout_s=_CLOSE_S, what="the Mooncake master")
            if not self.left.number:
                library.close()
                return
        except TransferError as error:
            logger.debug("The master does not answer: %s", error)
        finally:
            calls.close()
        logger.warning("A Mooncake client was left open: something does not answer it. It ends with this process.")

    def _set_up(self) -> Any:
        config = self._config
        words = [
            config.local_host,
            config.metadata,
            config.pool_bytes,
            _SMALLEST_BYTES,
            config.protocol,
            config.rdma_devices,
            config.master,
        ]
        self._reach(config.master)
        self._try([*words[:2], 0, *words[3:]])
        library = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code = library.setup(*words)
        if code != 0:
            raise _no_master(config.master, f"set-up returned code {code}")
        return library

    def _reach(self, master: str) -> None:
        """Check cheaply whether the master can be reached."""
        host, _, port = master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=self._config.start_timeout_s).close()
        except OSError as error:
            raise _no_master(master, str(error)) from error

    def _try(self, words: list[Any]) -> None:
        """Set up a client in another process first, as a trial."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", _TRY, json.dumps(words)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._config.start_timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _no_master(
                self._config.master, f"it did not answer within {self._config.start_timeout_s:g} s"
            ) from None
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise _no_master(self._config.master, last or f"a trial ended with {done.returncode}")


def replication(num_replicas: int) -> Any:
    """Return the replication settings of a put.

    Args:
        num_replicas: At least 1.
    """
    config = importlib.import_module("mooncake.store").ReplicateConfig()
    config.replica_num = num_replicas
    return config


def _no_master(master: str, why: str) -> TransferError:
    return TransferError(
        f"No Mooncake client can be set up with the master at {master}: {why[:300]}.",
        cause=TransferCause.UNREACHABLE,
        hint="Start mooncake_master there, or correct kv_connector.mooncake.master; local_host must be an address of this machine.",
    )
