"""What a component may take of the process it runs in: threads, memory for what has ended, and time for one call.

Time is the processor time of the calling thread, the least of several tries: other processes do not count.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

__all__ = ["call_s", "ends_its_threads", "growth_bytes"]

_GRACE_S = 10.0


@contextlib.contextmanager
def ends_its_threads(component: str) -> Iterator[None]:
    """Fail if a thread that was started within goes on 10 s after the end.

    Args:
        component: For the message.

    Raises:
        AssertionError: Threads are left; the message names them.
    """
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + _GRACE_S
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not left, f"{component} left {len(left)} threads running: {sorted(left)[:5]}"


def growth_bytes(operate: Callable[[int], None], *, warm: int = 1000, num: int = 2000) -> float:
    """Return by how many bytes each call of ``operate`` lets memory grow, once it has been called ``warm`` times.

    Args:
        operate: Called with 0, 1, 2, ...; what it was about is over when it returns.
        warm: Calls before the first look: tables and bounded histories fill up.
        num: Calls between the two looks.
    """
    for number in range(warm):
        operate(number)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(warm, warm + num):
            operate(number)
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / num
    finally:
        tracemalloc.stop()


def call_s(call: Callable[[], object], *, num_calls: int = 8, num_tries: int = 9) -> float:
    """Return the seconds of processor time that a call takes: the least mean of several tries."""
    taken = []
    for _ in range(num_tries):
        start_s = time.thread_time()
        for _ in range(num_calls):
            call()
        taken.append((time.thread_time() - start_s) / num_calls)
    return min(taken)
