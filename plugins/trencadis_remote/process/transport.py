"""Client side of the connection to a worker process: sends and receives messages, and detects the end of the process.

The end of the process makes a file readable, so it is detected at once. A process that hangs is killed by the stall watch.
"""

from __future__ import annotations

from collections import deque
from typing import NoReturn, Protocol

import msgspec

from trencadis.clock import Clock
from trencadis.errors import EngineEndedError
from trencadis_remote.process.channel import Channel, WakeUpFile
from trencadis_remote.process.messages import ClientMessage, CloseMessage, WorkerMessage
from trencadis_remote.process.wire import decode_worker_message, encode

__all__ = ["Transport", "Peer"]

_MAX_BYTES = 1 << 17
"""Decoded at once, and more only if the first message is longer: some milliseconds."""
_LAST_MESSAGES_S = 0.05
_CLOSING_S = 10.0


class Peer(Protocol):
    """The worker process."""

    def fileno(self) -> int:
        """Return a file that becomes readable when it has ended."""
        ...

    @property
    def stalled(self) -> str:
        """Where it has made no progress for too long; empty while all is well."""
        ...

    @property
    def progress(self) -> tuple[int, int | None]:
        """Number of buckets that it has prepared, and of all buckets, if known."""
        ...

    @property
    def part(self) -> str:
        """The part of loading that it runs, such as ``weights``; empty if it has not said."""
        ...

    def describe_end(self) -> str:
        """Return how it ended: a sentence whose subject is left out."""
        ...

    def close(self) -> None:
        """End it, and free what it held."""
        ...


class Transport:
    """A channel and its process. Used by one thread, except :meth:`interrupt`.

    Args:
        channel: To the worker; closed with the transport.
        peer: The worker process; closed with the transport.
        clock: Measures how long closing takes.

    Attributes:
        failure: Why the connection ended, or empty.
        end_file: Becomes and stays readable when the peer has ended.
        socket_file: Readable while :meth:`receive` has something to do.
    """

    def __init__(self, channel: Channel, peer: Peer, *, clock: Clock) -> None:
        self.failure = ""
        self._channel = channel
        self._peer = peer
        self._clock = clock
        self._rest: deque[bytes] = deque()
        self._is_interrupted = False
        self._wake_up = WakeUpFile()
        self.end_file, self._wake_file = peer.fileno(), self._wake_up.fileno()
        self.socket_file = channel.fileno()
        channel.watch(self.end_file)
        channel.watch(self._wake_file)

    def check(self) -> None:
        """Raise if the connection has ended.

        Raises:
            EngineEndedError: It has; the message says why.
        """
        if self.failure:
            raise EngineEndedError(self.failure)

    @property
    def stalled(self) -> str:
        """Where the peer has made no progress for too long; empty while all is well. From any thread."""
        return self._peer.stalled

    @property
    def progress(self) -> tuple[int, int | None]:
        """Number of buckets that the peer has prepared, and of all buckets, if known."""
        return self._peer.progress

    @property
    def part(self) -> str:
        """The part of loading that the peer runs, such as ``weights``; empty if it has not said. From any thread."""
        return self._peer.part

    def send(self, message: ClientMessage) -> None:
        """Send a message; waits while the socket is full.

        Raises:
            EngineEndedError: The connection has ended, or ended meanwhile.
            InvalidRequestError: The message cannot be encoded; nothing was sent.
        """
        self.check()
        data = encode(message)
        self._channel.send(data, while_waiting=self._wait_for_room)

    def wait(self, timeout_s: float | None = None) -> list[WorkerMessage]:
        """Wait for messages; returns none after :meth:`interrupt` or when time is up.

        Args:
            timeout_s: None: no limit.

        Raises:
            EngineEndedError: The connection has ended, or ended meanwhile.
        """
        self.check()
        readable = self._channel.wait(0.0 if self._is_interrupted or self._rest else timeout_s)
        self._is_interrupted = False
        if self._wake_file in readable:
            self._wake_up.clear()
        return self.receive_last() if self.end_file in readable else self.receive()

    def receive(self) -> list[WorkerMessage]:
        """Return the received messages; does not wait.

        Raises:
            EngineEndedError: A message cannot be read: the other process runs other code.
        """
        data = self._channel.receive()
        if self._rest or sum(map(len, data)) > _MAX_BYTES:
            self._rest += data
            data = self._next_portion()
        try:
            return list(map(decode_worker_message, data))
        except msgspec.DecodeError as error:
            self.fail(f"the engine's process sent a message that cannot be read: {error}.")

    @property
    def has_rest(self) -> bool:
        """True if received messages are not decoded yet: an event loop decodes them in a later turn."""
        return bool(self._rest) or self._channel.has_received

    def receive_last(self) -> list[WorkerMessage]:
        """Return the last messages of a process that has ended.

        Raises:
            EngineEndedError: There are no more.
        """
        messages = self.receive()
        if not messages:
            self._channel.wait(_LAST_MESSAGES_S, watching=False)
            messages = self.receive()
        if not messages:
            self.fail(f"the engine's process {self._peer.describe_end()}.")
        return messages

    def interrupt(self) -> None:
        """End the present or the next :meth:`wait`. From any thread."""
        self._wake_up.wake()

    def fail(self, failure: str) -> NoReturn:
        """End the connection.

        Raises:
            EngineEndedError: Always.
        """
        self.failure = failure
        raise EngineEndedError(failure)

    def close(self) -> None:
        """Ask the peer to end, give it some seconds, and end it; may be called twice."""
        if not self.failure:
            try:
                self.send(CloseMessage())
                self._await_end()
            except EngineEndedError:
                pass  # it has ended
            self.failure = self.failure or "the engine was closed."
        self._wake_up.close()
        self._channel.close()
        self._peer.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _next_portion(self) -> list[bytes]:
        taken: list[bytes] = []
        num_bytes = 0
        while self._rest and num_bytes < _MAX_BYTES:
            taken.append(self._rest.popleft())
            num_bytes += len(taken[-1])
        return taken

    def _wait_for_room(self, readable: list[int]) -> None:
        if self._wake_file in readable:
            self._is_interrupted = True
            self._wake_up.clear()
        if self.end_file in readable:
            self.fail(f"the engine's process {self._peer.describe_end()}.")

    def _await_end(self) -> None:
        """Receive until the process ends: it may wait for room in the socket."""
        deadline_s = self._clock.now_s() + _CLOSING_S
        while (left_s := deadline_s - self._clock.now_s()) > 0:
            self.wait(left_s)
