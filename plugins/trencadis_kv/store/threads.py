"""Background threads, each with a connection of its own to the store."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from trencadis.faults import FaultLog, as_words
from trencadis_kv.store.activity import Activity
from trencadis_kv.store.client import StoreClient

__all__ = ["StoreTask", "StoreThreads", "let_others_first"]

logger = logging.getLogger("trencadis.kv")

_INTERRUPT_EVERY_S = 0.05


def let_others_first() -> None:
    """Set the scheduling policy SCHED_BATCH: the calling thread does not preempt others when it wakes up.

    A low priority is not suitable: a thread that holds the GIL without a processor blocks all others.
    Source: SCHED_BATCH in sched(7) of Linux; nothing is done elsewhere.
    """
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class StoreTask(Protocol):
    """A task for a thread."""

    @property
    def is_wanted(self) -> bool:
        """False once no one waits for the result: a running call may be interrupted."""
        ...

    def run(self, client: StoreClient) -> None:
        """Run, and record the result. Must not raise."""
        ...


Task = TypeVar("Task", bound=StoreTask)


class StoreThreads(Generic[Task]):
    """A task queue and its threads, which start with the first task.

    Args:
        name: Name of the threads.
        num_threads: Number of threads.
        make_client: Returns a new connection for one thread.
        activity: Counts the tasks that are queued or running.
    """

    def __init__(
        self, name: str, num_threads: int, *, make_client: Callable[[], StoreClient], activity: Activity
    ) -> None:
        self._name = name
        self._num_threads = num_threads
        self._make_client = make_client
        self._activity = activity
        self._changed = threading.Condition()
        self._queue: deque[Task] = deque()
        self._running: dict[StoreClient, Task] = {}
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._faults = FaultLog(logger)

    def put(self, task: Task) -> bool:
        """Queue a task; False if the threads are closed."""
        with self._changed:
            if self._is_closing:
                return False
            if not self._threads:
                self._start()
            self._activity.begin()
            self._queue.append(task)
            self._changed.notify()
            return True

    def take_back(self, task: Task) -> bool:
        """Remove a task from the queue; False if it is not there."""
        with self._changed:
            if task not in self._queue:
                return False
            self._queue.remove(task)
        self._activity.end()
        return True

    def take_oldest(self) -> Task | None:
        """Remove and return the next task of the queue."""
        with self._changed:
            if not self._queue:
                return None
            task = self._queue.popleft()
        self._activity.end()
        return task

    def is_running(self, task: Task) -> bool:
        """Return whether a thread runs the task now."""
        with self._changed:
            return task in self._running.values()

    def interrupt_unwanted(self) -> None:
        """Interrupt calls of running tasks whose result is not needed."""
        with self._changed:
            clients = [client for client, task in self._running.items() if not task.is_wanted]
        for client in clients:
            client.interrupt()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every task is done; False if that takes longer.

        Args:
            timeout_s: Seconds of real time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._running, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Clear the queue, interrupt running calls, and stop the threads; False if one does not stop in time.

        Args:
            timeout_s: Seconds of real time.
        """
        with self._changed:
            self._is_closing = True
            num_dropped = len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        self._activity.end(num_dropped)
        deadline_s = time.monotonic() + timeout_s
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline_s:
            with self._changed:
                clients = list(self._running)
            for client in clients:
                client.interrupt()
            for thread in self._threads:
                thread.join(_INTERRUPT_EVERY_S)
        ended = not any(thread.is_alive() for thread in self._threads)
        if not ended:
            logger.warning("A thread %s does not end: its store ignores interrupt().", self._name)
        return ended

    def _start(self) -> None:
        for i in range(self._num_threads):
            thread = threading.Thread(target=self._work, name=f"{self._name}-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        let_others_first()
        client = self._make_client()
        while (task := self._next(client)) is not None:
            try:
                task.run(client)
            except BaseException as error:  # a thread that ended here would leave its tasks waiting
                self._faults.say(
                    "task", f"A task of {self._name} raised {as_words(error)}.", error=error, level=logging.ERROR
                )
            with self._changed:
                del self._running[client]
                self._changed.notify_all()
            self._activity.end()
        client.close()

    def _next(self, client: StoreClient) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._is_closing)
            if self._is_closing:
                return None
            task = self._queue.popleft()
            self._running[client] = task
            return task
