"""Starts replicas again, each on a thread of its own, since loading a model takes its time; hands them over when they are ready."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from trencadis.errors import TrencadisError
from trencadis_remote.process.channel import WakeUpFile
from trencadis_remote.process.client import RemoteEngineClient

__all__ = ["ReplicaStarter", "Starter"]

logger = logging.getLogger("trencadis")

_RETRY_S = 1.0


class Starter(Protocol):
    """Replaces replicas that ended, while the client goes on with the others."""

    def fileno(self) -> int:
        """Return a file that is readable while :meth:`take` returns something."""
        ...

    def start(self, replica: int, ended: RemoteEngineClient, *, delays_s: Callable[[], float | None]) -> None:
        """Close what was a replica, and begin to start it again; not called again for it before :meth:`take` returned it.

        Args:
            replica: Which.
            ended: Ended client of the replica, not used by anybody else any more.
            delays_s: How long to wait before each try, seconds, or None to give up; called once for each. From any thread.
        """
        ...

    def take(self) -> list[tuple[int, RemoteEngineClient]]:
        """Return the replicas that are ready, since the last call; their clients are the caller's from now on."""
        ...

    def close(self) -> None:
        """End what is being started, and wait for that."""
        ...


class ReplicaStarter:
    """Starts replicas on threads.

    Args:
        start: ``start(replica, is_closing)`` starts one and returns its client when it is ready; blocks, and gives up soon after
            ``is_closing()`` is true, by an error.
    """

    def __init__(self, start: Callable[[int, Callable[[], bool]], RemoteEngineClient]) -> None:
        self._start = start
        self._ready: queue.SimpleQueue[tuple[int, RemoteEngineClient]] = queue.SimpleQueue()
        self._wake_up = WakeUpFile()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def fileno(self) -> int:
        """Return a file that is readable while :meth:`take` returns something."""
        return self._wake_up.fileno()

    def start(self, replica: int, ended: RemoteEngineClient, *, delays_s: Callable[[], float | None]) -> None:
        """Begin to start a replica."""
        self._threads = [one for one in self._threads if one.is_alive()]
        arguments = (replica, ended, delays_s)
        thread = threading.Thread(target=self._main, args=arguments, name=f"trencadis-replica-{replica}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def take(self) -> list[tuple[int, RemoteEngineClient]]:
        """Return the replicas that are ready."""
        self._wake_up.clear()
        ready = []
        while not self._ready.empty():
            ready.append(self._ready.get())
        return ready

    def close(self) -> None:
        """End what is being started."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for _, client in self.take():
            client.close()
        self._wake_up.close()

    def _main(self, replica: int, ended: RemoteEngineClient, delays_s: Callable[[], float | None]) -> None:
        ended.close()
        while (delay_s := delays_s()) is not None and not self._closing.wait(delay_s):
            logger.warning("Starting replica %d again.", replica)
            try:
                client = self._start(replica, self._closing.is_set)
            except (TrencadisError, OSError) as error:  # OSError: no process, descriptor or file to be had now
                if not self._closing.is_set():
                    logger.error("Replica %d could not be started again: %s", replica, error)
                if self._closing.wait(_RETRY_S):
                    return
                continue
            self._ready.put((replica, client))
            self._wake_up.wake()
            return
