"""Message channel between two processes over ZeroMQ, and a file that wakes a poll.

Every message arrives, in order. A full socket blocks its sender and drops nothing; a sender that waits receives meanwhile, so two
senders cannot block each other.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq

__all__ = ["Channel", "WakeUpFile"]

_POLLIN, _EVENTS, _NOBLOCK = int(zmq.POLLIN), zmq.EVENTS, zmq.NOBLOCK  # arithmetic with members of an enum is slow
HIGH_WATER_MARK = 64
"""Messages that either side's socket holds before a sender waits."""


class Channel:
    """One end of the channel. Used by one thread.

    Args:
        address: Such as ``ipc:///run/x/engine``.
        binds: This end makes the address; the other one connects.
        high_water_mark: Messages in the socket before a sender waits.
        never_waits: :meth:`send` keeps messages in memory while the socket is full; for a thread that also serves others.
    """

    def __init__(
        self, address: str, *, binds: bool, high_water_mark: int = HIGH_WATER_MARK, never_waits: bool = False
    ) -> None:
        self._context = zmq.Context()
        # A DEALER with one peer is a pipe: it blocks where others drop.
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(high_water_mark)
        if never_waits:
            self._socket.set(zmq.SNDHWM, 0)
        if binds:
            self._socket.bind(address)
        else:
            self._socket.connect(address)
        self._inbox: list[bytes] = []
        self._watched: list[Any] = []

    def fileno(self) -> int:
        """Return a file that becomes readable once when messages may have come; :meth:`receive` resets it.

        :meth:`send` resets it, too: call :meth:`receive` after each.

        Source: zmq_getsockopt(3), ZMQ_FD.
        """
        return int(self._socket.getsockopt(zmq.FD))

    def watch(self, fileno: int) -> None:
        """End :meth:`wait` when a file becomes readable, too."""
        self._watched.append((fileno, zmq.POLLIN))

    def send(self, data: bytes, *, while_waiting: Callable[[list[int]], float | None] = lambda _: None) -> None:
        """Send a message; waits while the socket is full, and receives meanwhile.

        Args:
            data: The message.
            while_waiting: Called before each turn of waiting with the watched files that are readable; returns the longest next
                turn in seconds, None for no limit. It may raise to give up: then the message is not sent.
        """
        readable: list[int] = []
        while True:
            try:
                self._socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                self._receive_all()
                readable = self._poll(zmq.POLLIN | zmq.POLLOUT, while_waiting(readable))
            else:
                return

    def receive(self, *, is_likely: bool = False) -> list[bytes]:
        """Return, in order, every message that is here; does not wait.

        Args:
            is_likely: The socket's file is readable: the first receive needs no check.
        """
        if is_likely:
            with contextlib.suppress(zmq.Again):
                self._inbox.append(self._socket.recv(_NOBLOCK))
        self._receive_all()
        messages, self._inbox = self._inbox, []
        return messages

    def wait(self, timeout_s: float | None = None, *, watching: bool = True) -> list[int]:
        """Sleep until a message is here, a watched file is readable, or time is up; returns the readable files.

        Args:
            timeout_s: None: no limit.
            watching: False: for a message only.
        """
        return [] if self._inbox else self._poll(zmq.POLLIN, timeout_s, watching=watching)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Free the socket; may be called twice.

        Args:
            linger_s: The longest wait for queued messages to be sent.
        """
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def _poll(self, events: int, timeout_s: float | None, *, watching: bool = True) -> list[int]:
        # Rounded up: a wait that ends too early would be repeated at once.
        timeout_ms = -1 if timeout_s is None else max(0, math.ceil(timeout_s * 1000))
        files = self._watched if watching else []
        ready = zmq.zmq_poll([(self._socket, events), *files], timeout_ms)
        return [one for one, _ in ready if one is not self._socket]

    def _receive_all(self) -> None:
        # Asking is cheaper than an exception for each time that there is nothing.
        socket = self._socket
        while int(socket.getsockopt(_EVENTS)) & _POLLIN:
            self._inbox.append(socket.recv(_NOBLOCK))


class WakeUpFile:
    """A file that is readable from :meth:`wake` to :meth:`clear`; wakes a thread that polls it, from any other."""

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
        """Make the file unreadable again."""
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
