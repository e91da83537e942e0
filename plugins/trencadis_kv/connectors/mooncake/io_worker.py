"""Memory that blocks go through on their way to a Mooncake store and back, and the thread that may be left behind with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.native_calls import LeftBehind, NativeCalls

__all__ = ["IOWorker"]

T = TypeVar("T")


class IOWorker:
    """A registered buffer and the calls that use it. One caller at a time.

    Args:
        library: The client.
        num_bytes: Of the buffer.
        left: Counts calls that were left behind.

    Attributes:
        data: The buffer, ``[num_bytes]``; not to be touched after a call was left behind.
        address: Of its first byte.
    """

    def __init__(self, library: Any, num_bytes: int, *, left: LeftBehind) -> None:
        self._library = library
        self._is_registered = False
        self.data = np.empty(num_bytes, np.uint8)
        self.address = int(self.data.ctypes.data)
        self._calls = NativeCalls("trencadis-mooncake", left=left, on_end=self._forget)

    @property
    def is_left(self) -> bool:
        """True once a call was left behind with the buffer."""
        return self._calls.is_left

    def run(self, call: Callable[[Any], T], *, timeout_s: float) -> T:
        """Return what a call of the library returns; see :meth:`NativeCalls.run`."""

        def on_thread() -> T:
            self._register()
            return call(self._library)

        return self._calls.run(on_thread, timeout_s=timeout_s, what="Mooncake")

    def interrupt(self) -> None:
        """Leave the call behind that runs. From any thread."""
        self._calls.interrupt()

    def close(self) -> None:
        """Give the buffer up, once nothing writes to it."""
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
