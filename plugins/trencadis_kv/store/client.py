"""One connection to a store, for one thread: made when it is first needed, and interrupted by others."""

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
    """Calls a store; whatever it raises comes out as ``TransferError``.

    Args:
        make_store: Returns a new connection.
        name: Names the connector in errors.
    """

    def __init__(self, make_store: Callable[[], BlockStore], *, name: str) -> None:
        self._make_store = make_store
        self._name = name
        self._lock = threading.Lock()
        self._store: BlockStore | None = None
        self._is_calling = False
        self._faults = FaultLog(logger)

    def call(self, run: Callable[[BlockStore], T]) -> T:
        """Return what a call of the store returns. By the thread whose client this is.

        Raises:
            TransferError: It could not be done.
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
        """Let the call that runs, if one does, raise soon. From any thread."""
        with self._lock:
            if self._store is None or not self._is_calling:
                return
            try:
                self._store.interrupt()
            except Exception as error:
                self._faults.say("interrupt", f"The KV store of {self._name} raised from interrupt().", error=error)

    def close(self) -> None:
        """Give the connection up. By the thread whose client this is."""
        store, self._store = self._store, None
        if store is None:
            return
        try:
            store.close()
        except Exception as error:
            self._faults.say("close", f"The KV store of {self._name} raised from close().", error=error)
