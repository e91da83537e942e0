"""Message channel between two processes, over a :class:`trencadis.link.Link`, and a file that wakes a poll.

Every message arrives, in order. A full socket blocks its sender and drops nothing; a sender that waits receives meanwhile, so two
senders cannot block each other.
"""

from __future__ import annotations

import contextlib
import math
import select
import selectors
import socket
import threading
from collections.abc import Callable

from trencadis.link import Link, LinkClosedError

__all__ = ["Channel", "WakeUpFile"]

_ALSO_ROOM = selectors.EVENT_READ | selectors.EVENT_WRITE


class Channel:
    """One end of the channel. Used by one thread. What is sent to a process that has ended is dropped.

    Args:
        end: Connected to the other end; closed with the channel.
        never_waits: :meth:`send` keeps messages in memory while the socket is full; for a thread that also serves others.
    """

    def __init__(self, end: socket.socket, *, never_waits: bool = False) -> None:
        self._end = end
        self._link = Link(end)
        self._never_waits = never_waits
        self._inbox: list[bytes] = []
        # Its own file is readable when a message has come or, while some wait, when one can be sent.
        self._ready = selectors.DefaultSelector()
        self._ready.register(end, selectors.EVENT_READ)
        self._events = selectors.EVENT_READ
        self._alone, self._all = select.poll(), select.poll()
        for poll in (self._alone, self._all):
            poll.register(self.fileno(), select.POLLIN)

    def fileno(self) -> int:
        """Return a file that is readable while :meth:`receive` has something to do: messages have come, or can be sent."""
        return self._ready.fileno()

    @property
    def has_received(self) -> bool:
        """True if messages are here that the file does not show: they came while :meth:`send` waited."""
        return bool(self._inbox)

    def watch(self, fileno: int) -> None:
        """End :meth:`wait` when a file becomes readable, too."""
        self._all.register(fileno, select.POLLIN)

    def send(self, data: bytes, *, while_waiting: Callable[[list[int]], float | None] = lambda _: None) -> None:
        """Send a message; waits while the socket is full, and receives meanwhile.

        Args:
            data: The message.
            while_waiting: Called before each turn of waiting with the watched files that are readable; returns the longest next
                turn in seconds, None for no limit. It may raise to give up: the other end may then get the message or not.
        """
        if not self._events:
            return
        try:
            self._link.send(data)
        except LinkClosedError:
            self._forget()
        if self._link.has_unsent:
            self._exchange()
            readable: list[int] = []
            while self._events & selectors.EVENT_WRITE and not self._never_waits:
                readable = self._poll(self._all, while_waiting(readable))
                self._exchange()

    def receive(self) -> list[bytes]:
        """Return, in order, every message that is here; does not wait."""
        self._exchange()
        messages, self._inbox = self._inbox, []
        return messages

    def receive_first(self) -> bytes:
        """Return the next message alone; waits for it."""
        while not self._inbox:
            self.wait()
            self._exchange()
        return self._inbox.pop(0)

    def wait(self, timeout_s: float | None = None, *, watching: bool = True) -> list[int]:
        """Sleep until there is something to receive, a watched file is readable, or time is up; returns the readable files.

        Args:
            timeout_s: None: no limit.
            watching: False: for a message only.
        """
        return [] if self._inbox else self._poll(self._all if watching else self._alone, timeout_s)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Free the socket; may be called twice.

        Args:
            linger_s: The longest wait until what was sent has gone to the socket.
        """
        with contextlib.suppress(LinkClosedError):
            while linger_s and self._link.has_unsent and self._link.wait(linger_s):
                self._link.flush()
        self._ready.close()
        self._link.close()

    def _poll(self, poll: select.poll, timeout_s: float | None) -> list[int]:
        # Rounded up: a wait that ends too early would be repeated at once.
        timeout_ms = None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))
        own = self.fileno()
        return [file for file, _ in poll.poll(timeout_ms) if file != own]

    def _exchange(self) -> None:
        """Send what waits and receive what is here, as far as the socket goes."""
        if not self._events:
            return
        try:
            self._inbox += self._link.receive()
            if self._link.has_unsent:
                self._link.flush()
        except LinkClosedError:
            self._forget()
            return
        wanted = _ALSO_ROOM if self._link.has_unsent else selectors.EVENT_READ
        if self._events != wanted:
            self._events = wanted
            self._ready.modify(self._end, wanted)

    def _forget(self) -> None:
        """Watch the socket no more: the other end is closed, and nothing comes from it."""
        self._events = 0
        self._ready.unregister(self._end)


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
