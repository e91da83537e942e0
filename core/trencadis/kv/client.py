"""One connection to a store, for one thread: made when it is first needed, and interrupted by others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from trencadis.errors import TransferError
from trencadis.kv.store import BlockStore
from trencadis.records import TransferCause

__all__ = ["StoreClient"]

logger = logging.getLogger("trencadis.kv")

T = TypeVar("T")


class StoreClient:
    """Calls a store; whatever it raises comes out as ``TransferError``.

    Args:
        make_store: Returns a new connection.
        name: Of the connector, for errors.
    """

    def __init__(self, make_store: Callable[[], BlockStore], *, name: str) -> None:
        self._make_store = make_store
        self._name = name
        self._lock = threading.Lock()
        self._store: BlockStore | None = None
        self._is_calling = False

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
        except Exception as error:
            raise TransferError(
                f"The KV store of {self._name} raised {type(error).__name__}: {error}", cause=TransferCause.RAISED
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
            except Exception:
                logger.warning("The KV store of %s raised from interrupt().", self._name, exc_info=True)

    def close(self) -> None:
        """Give the connection up. By the thread whose client this is."""
        store, self._store = self._store, None
        if store is None:
            return
        try:
            store.close()
        except Exception:
            logger.warning("The KV store of %s raised from close().", self._name, exc_info=True)
