from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from trencadis.thread_watch import MOST_MORE, ThreadWatch

LOGGER = logging.getLogger("trencadis.test")


@pytest.fixture
def leak() -> Iterator[object]:
    """Starts threads that run until the test is over."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def start(number: int, make: type[threading.Thread] = threading.Thread) -> None:
        for _ in range(number):
            threads.append(make(target=over.wait, args=(20,), name=f"poll-{len(threads)}"))
            threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()


def test_many_more_threads_than_at_the_start_are_told_once_with_whose_they_are(leak, caplog) -> None:
    watch = ThreadWatch(LOGGER, "The engine")
    start = watch.look()
    leak(MOST_MORE)
    assert watch.look() == start + MOST_MORE
    assert not caplog.records
    leak(1)
    watch.look()
    leak(1)
    assert watch.look() == start + MOST_MORE + 2
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(
        f"The engine has {start + MOST_MORE + 1} threads, {MOST_MORE + 1} more than at its start, and "
    )
    assert "run code of threading, such as '" in said


class Poller(threading.Thread):
    """A thread with a method of its own, as plugins write them."""

    def __init__(self, *, target: object, args: tuple[float], name: str) -> None:
        super().__init__(name=name)
        self._wait = lambda: target(*args)  # type: ignore[operator]

    def run(self) -> None:
        self._wait()


def test_threads_of_a_class_of_their_own_are_of_its_module(leak, caplog) -> None:
    watch = ThreadWatch(LOGGER, "The engine")
    leak(MOST_MORE + 1, Poller)
    watch.look()
    assert f"run code of {__name__}" in caplog.records[0].getMessage()
