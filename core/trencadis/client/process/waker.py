"""Wakes a thread that sleeps in a poll, from any other."""

from __future__ import annotations

import contextlib
import socket
import threading

__all__ = ["Waker"]


class Waker:
    """A file that becomes readable when :meth:`wake` is called, until :meth:`clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._is_awake = False
        self._is_closed = False

    def fileno(self) -> int:
        """Return the file to poll."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the file readable. From any thread; nothing happens after :meth:`close`."""
        with self._lock:
            if not self._is_awake and not self._is_closed:
                self._is_awake = True
                self._writer.send(b"\0")

    def clear(self) -> None:
        """Make the file silent again."""
        with self._lock:
            if self._is_awake:
                self._is_awake = False
                with contextlib.suppress(BlockingIOError):
                    self._reader.recv(1)

    def close(self) -> None:
        """Free the file; may be called twice."""
        with self._lock:
            self._is_closed = True
            self._is_awake = False
            self._reader.close()
            self._writer.close()
