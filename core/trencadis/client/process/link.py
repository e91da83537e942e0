"""The client's end of the line: messages, and the news that there will be no more of them.

A peer that dies is heard at once, through a file that its end makes readable. One that hangs is killed by the stall watch, and so
ends as well. The line is dead from then on and says why.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from trencadis.client.process.channel import Channel
from trencadis.client.process.messages import ClientMessage, CloseMessage, HostMessage, encode, host_message_decoder
from trencadis.client.process.waker import Waker
from trencadis.clock import Clock
from trencadis.errors import EngineEndedError

__all__ = ["Link", "Peer"]

_MAX_BYTES = 1 << 17
"""Decoded at once, and more only if the first message is longer: some milliseconds."""
_LAST_WORDS_S = 0.05
_CLOSING_S = 10.0


class Peer(Protocol):
    """The process at the other end."""

    def fileno(self) -> int:
        """Return a file that becomes readable when it has ended."""
        ...

    @property
    def stalled(self) -> str:
        """Where it has made no progress for too long; empty while all is well."""
        ...

    def describe_end(self) -> str:
        """Return how it ended: a sentence whose subject is left out."""
        ...

    def close(self) -> None:
        """End it, and free what it held."""
        ...


class Link:
    """A channel, the process behind it, and what wakes who waits for it. Used by one thread.

    Args:
        channel: To the host; closed with the link.
        peer: Its process; closed with the link.
        clock: Measures how long a peer takes to end when it is asked to.

    Attributes:
        failure: Why the line is dead, or empty.
        end_file: Becomes and stays readable when the peer has ended.
        socket_file: Becomes readable when something may have come.
    """

    def __init__(self, channel: Channel, peer: Peer, *, clock: Clock) -> None:
        self.failure = ""
        self._channel = channel
        self._peer = peer
        self._clock = clock
        self._decode = host_message_decoder()
        self._rest: deque[bytes] = deque()
        self._is_interrupted = False
        self._waker = Waker()
        self.end_file, self._wake_file = peer.fileno(), self._waker.fileno()
        self.socket_file = channel.fileno()
        channel.watch(self.end_file)
        channel.watch(self._wake_file)

    def check(self) -> None:
        """Raise if the line is dead.

        Raises:
            EngineEndedError: It is; the message says why.
        """
        if self.failure:
            raise EngineEndedError(self.failure)

    @property
    def stalled(self) -> str:
        """Where the peer has made no progress for too long; empty while all is well. From any thread."""
        return self._peer.stalled

    def send(self, message: ClientMessage) -> None:
        """Send a message; waits only while the peer has no room for it.

        Raises:
            EngineEndedError: The line is dead, or died meanwhile.
            InvalidRequestError: The message cannot be encoded; nothing was sent, and the line is as it was.
        """
        self.check()
        data = encode(message)
        self._channel.send(data, while_waiting=self._wait_for_room)

    def receive(self, timeout_s: float | None = None) -> list[HostMessage]:
        """Wait for messages; returns without any after :meth:`interrupt` or when time is up.

        Args:
            timeout_s: None: no limit.

        Raises:
            EngineEndedError: The line is dead, or died meanwhile.
        """
        self.check()
        readable = self._channel.wait(0.0 if self._is_interrupted or self._rest else timeout_s)
        self._is_interrupted = False
        if self._wake_file in readable:
            self._waker.clear()
        return self.take_last() if self.end_file in readable else self.take_in()

    def take_in(self, *, is_likely: bool = False) -> list[HostMessage]:
        """Return what has come; does not wait.

        Args:
            is_likely: The socket's file says that something has.
        """
        data = self._channel.receive(is_likely=is_likely)
        if self._rest or sum(map(len, data)) > _MAX_BYTES:
            self._rest += data
            data = self._take_from_rest()
        return list(map(self._decode, data))

    @property
    def has_rest(self) -> bool:
        """True if more has come than was decoded: an event loop takes the rest in a later turn."""
        return bool(self._rest)

    def take_last(self) -> list[HostMessage]:
        """Return what a peer said that has ended.

        Raises:
            EngineEndedError: There is no more of that.
        """
        messages = self.take_in()
        if not messages:
            self._channel.wait(_LAST_WORDS_S, watching=False)
            messages = self.take_in()
        if not messages:
            self.fail(f"the engine's process {self._peer.describe_end()}.")
        return messages

    def interrupt(self) -> None:
        """End the present or the next :meth:`receive`. From any thread."""
        self._waker.wake()

    def fail(self, failure: str) -> None:
        """Call the line dead.

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
        self._waker.close()
        self._channel.close()
        self._peer.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _take_from_rest(self) -> list[bytes]:
        taken: list[bytes] = []
        num_bytes = 0
        while self._rest and num_bytes < _MAX_BYTES:
            taken.append(self._rest.popleft())
            num_bytes += len(taken[-1])
        return taken

    def _wait_for_room(self, readable: list[int]) -> None:
        if self._wake_file in readable:
            self._is_interrupted = True
            self._waker.clear()
        if self.end_file in readable:
            self.fail(f"the engine's process {self._peer.describe_end()}.")

    def _await_end(self) -> None:
        """Take in what still comes, so that the peer can end, until it does."""
        deadline_s = self._clock.now_s() + _CLOSING_S
        while (left_s := deadline_s - self._clock.now_s()) > 0:
            self.receive(left_s)
