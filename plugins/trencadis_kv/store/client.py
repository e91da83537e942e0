"""One thread's connection to a store: opened on first use, interruptible from other threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from trencadis.errors import TransferError
from trencadis.faults import FaultLog, as_words, reraise_interrupt
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import TransferCause

__all__ = ["StoreClient"]

logger = logging.getLogger("trencadis.kv")

T = TypeVar("T")


class StoreClient:
    """Calls a store and converts its exceptions to ``TransferError``.

    Args:
        make_store: Returns a new connection.
        name: Name of the connector, for errors.
    """

    def __init__(self, make_store: Callable[[], BlockStore], *, name: str) -> None:
        self._make_store = make_store
        self._name = name
        self._lock = threading.Lock()
        self._store: BlockStore | None = None
        self._is_calling = False
        self._faults = FaultLog(logger)

    def call(self, run: Callable[[BlockStore], T]) -> T:
        """Return the result of a call of the store. By the owning thread.

        Raises:
            TransferError: The call failed.
        """
        try:
            if self._store is None:
                store = self._make_store()
                with self._lock:
                    self._store = store
            with self._lock:
                self._is_calling = True
            return run(self._store)
        except TransferError:
            raise
        except BaseException as error:
            reraise_interrupt(error)
            raise TransferError(
                f"The KV store of {self._name} raised {as_words(error)}", cause=TransferCause.RAISED
            ) from error
        finally:
            with self._lock:
                self._is_calling = False

    def interrupt(self) -> None:
        """Make the running call raise soon, if there is one. From any thread."""
        with self._lock:
            if self._store is None or not self._is_calling:
                return
            try:
                self._store.interrupt()
            except Exception as error:
                self._faults.say("interrupt", f"The KV store of {self._name} raised from interrupt().", error=error)

    def close(self) -> None:
        """Close the connection. By the owning thread."""
        store, self._store = self._store, None
        if store is None:
            return
        try:
            store.close()
        except Exception as error:
            self._faults.say("close", f"The KV store of {self._name} raised from close().", error=error)
