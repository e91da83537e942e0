"""The client's end of the line: messages, and the news that there will be no more of them.

A peer that dies is heard at once, through a file that its end makes readable. A peer that hangs is silent while it has work: it is
killed after a while. Either way the line is dead from then on and says why.
"""

from __future__ import annotations

from typing import Protocol

from trencadis.clock import Clock
from trencadis.errors import EngineEndedError
from trencadis.remote.channel import Channel
from trencadis.remote.messages import ClientMessage, CloseMessage, HostMessage, encode, host_message_decoder
from trencadis.remote.waker import Waker

__all__ = ["Link", "Peer"]

_LAST_WORDS_S = 0.05
_CLOSING_S = 10.0


class Peer(Protocol):
    """The process at the other end."""

    def fileno(self) -> int:
        """Return a file that becomes readable when it has ended."""
        ...

    def kill(self) -> None:
        """End it at once."""
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
        watchdog_s: With work and silent for longer, the peer hangs.
        clock: Measures silence.

    Attributes:
        failure: Why the line is dead, or empty.
        end_file: Becomes and stays readable when the peer has ended.
        socket_file: Becomes readable when something may have come.
    """

    def __init__(self, channel: Channel, peer: Peer, *, watchdog_s: float, clock: Clock) -> None:
        self.failure = ""
        self._channel = channel
        self._peer = peer
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._heard_s = clock.now_s()
        self._decode = host_message_decoder()
        self._blocked_s: float | None = None
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

    def work_begins(self) -> None:
        """Count silence from now: until now the peer had nothing to say."""
        self._heard_s = self._clock.now_s()

    def send(self, message: ClientMessage) -> None:
        """Send a message; waits only while the peer has no room for it.

        Raises:
            EngineEndedError: The line is dead, or died meanwhile.
            InvalidRequestError: The message cannot be encoded; nothing was sent, and the line is as it was.
        """
        self.check()
        data = encode(message)
        self._blocked_s = None
        self._channel.send(data, while_waiting=self._wait_for_room)

    def receive(self, timeout_s: float | None = None, *, has_work: bool) -> list[HostMessage]:
        """Wait for messages; returns without any after :meth:`interrupt` or when time is up.

        Args:
            timeout_s: None: no limit.
            has_work: The peer ought to say something: its silence is watched.

        Raises:
            EngineEndedError: The line is dead, or died meanwhile.
        """
        self.check()
        if has_work:
            timeout_s = self.patience_s if timeout_s is None else min(timeout_s, self.patience_s)
        readable = self._channel.wait(0.0 if self._is_interrupted else timeout_s)
        self._is_interrupted = False
        if self._wake_file in readable:
            self._waker.clear()
        messages = self.take_last() if self.end_file in readable else self.take_in()
        if not messages and has_work:
            self.check_silence()
        return messages

    def take_in(self, *, is_likely: bool = False) -> list[HostMessage]:
        """Return what has come; does not wait.

        Args:
            is_likely: The socket's file says that something has.
        """
        data = self._channel.receive(is_likely=is_likely)
        if data:
            self._heard_s = self._clock.now_s()
        return list(map(self._decode, data))

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

    @property
    def patience_s(self) -> float:
        """How long a peer with work may be silent still, seconds."""
        return self._heard_s + self._watchdog_s - self._clock.now_s()

    def check_silence(self) -> None:
        """Call a peer that has work hung if it was silent for too long.

        Raises:
            EngineEndedError: It was; it is killed.
        """
        if self.patience_s <= 0:
            self._hang()

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

    def _wait_for_room(self, readable: list[int]) -> float:
        if self._wake_file in readable:
            self._is_interrupted = True
            self._waker.clear()
        if self.end_file in readable:
            self.fail(f"the engine's process {self._peer.describe_end()}.")
        now_s = self._clock.now_s()
        self._blocked_s = now_s if self._blocked_s is None else self._blocked_s
        left_s = self._blocked_s + self._watchdog_s - now_s
        if left_s <= 0:
            self._hang()
        return left_s

    def _hang(self) -> None:
        self._peer.kill()
        self.fail(
            f"the engine's process hung: it had work and was silent for {self._watchdog_s:g} s "
            "([engine] watchdog_s); it was killed."
        )

    def _await_end(self) -> None:
        """Take in what still comes, so that the peer can end, until it does."""
        deadline_s = self._clock.now_s() + _CLOSING_S
        while (left_s := deadline_s - self._clock.now_s()) > 0:
            self.receive(left_s, has_work=False)
