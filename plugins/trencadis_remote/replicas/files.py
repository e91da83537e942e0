"""Files of several replicas that a thread or an event loop waits for, behind two of their own."""

from __future__ import annotations

import selectors
from typing import Any

from trencadis_remote.process.channel import WakeUpFile
from trencadis_remote.process.client import RemoteEngineClient

__all__ = ["ReplicaFiles", "Selector"]


class Selector:
    """Watches files; its own file is readable while one of them is."""

    def __init__(self) -> None:
        self._selector: Any = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Return the file that is readable while one of the others is."""
        return int(self._selector.fileno())

    def watch(self, file: int) -> None:
        """Watch a file, too."""
        self._selector.register(file, selectors.EVENT_READ)

    def ignore(self, file: int) -> None:
        """Watch a file no more."""
        self._selector.unregister(file)

    def readable(self, timeout_s: float | None = 0.0) -> set[int]:
        """Return the files that are readable, once there is one or time is up; None: no limit."""
        return {key.fd for key, _ in self._selector.select(timeout_s)}

    def close(self) -> None:
        """Free the selector."""
        self._selector.close()


class ReplicaFiles:
    """What a client of several replicas waits for.

    Args:
        starter: File that is readable while a replica is ready again.

    Attributes:
        messages: Sockets of the replicas.
        ends: Ends of their processes, what is ready again, and :attr:`over`.
        wake_up: File that ends a wait.
        over: File that is readable once nothing serves any more.
    """

    def __init__(self, starter: int) -> None:
        self.messages, self.ends, self._all = Selector(), Selector(), Selector()
        self.wake_up, self.over = WakeUpFile(), WakeUpFile()
        self.ends.watch(starter)
        self.ends.watch(self.over.fileno())
        for one in (self.messages, self.ends, self.wake_up):
            self._all.watch(one.fileno())

    def watch(self, client: RemoteEngineClient) -> None:
        """Watch a replica that is ready."""
        self.messages.watch(client.socket_file)
        self.ends.watch(client.end_file)

    def ignore(self, client: RemoteEngineClient) -> None:
        """Watch a replica no more."""
        self.messages.ignore(client.socket_file)
        self.ends.ignore(client.end_file)

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until something is readable or time is up; returns whether a replica has ended or is ready again."""
        readable = self._all.readable(timeout_s)
        if self.wake_up.fileno() in readable:
            self.wake_up.clear()
        return self.ends.fileno() in readable

    def close(self) -> None:
        """Free all of them."""
        for one in (self._all, self.ends, self.messages, self.wake_up, self.over):
            one.close()
