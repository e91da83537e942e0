"""Calls of libraries that cannot be interrupted: each runs on a thread that can be abandoned.

A call can block for as long as its peer hangs, and may then still write to the buffers it was given. So the caller
waits only until its deadline, and the thread of an abandoned call keeps the buffers until the call has returned.

    caller ──call──▶ thread ──▶ library
       │ deadline, or interrupt()      │
       ▼                               ▼ some time
     TransferError               its buffers are released
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from trencadis.errors import TransferError
from trencadis.records import TransferCause

__all__ = ["AbandonedCalls", "NativeCalls"]

T = TypeVar("T")
_NOTHING: Final = object()


class AbandonedCalls:
    """Counts the abandoned calls of one connector. From any thread.

    Args:
        limit: Number of abandoned calls at which no further call begins: each holds a thread and memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._number = 0

    @property
    def number(self) -> int:
        """Abandoned calls that have not returned."""
        return self._number

    @property
    def has_room(self) -> bool:
        """True while fewer than ``limit`` calls are abandoned."""
        return self._number < self._limit

    def add(self, number: int) -> None:
        """Add to the count, 1 or -1."""
        with self._lock:
            self._number += number


class NativeCalls:
    """Runs calls on a thread, which starts with the first. Unusable once a call was abandoned.

    Args:
        name: Name of the thread.
        left: Counter of abandoned calls.
        on_end: Called on the thread after the last call; releases the resources that the calls used.
    """

    def __init__(self, name: str, *, left: AbandonedCalls, on_end: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._left = left
        self._on_end = on_end
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._call: Callable[[], Any] | None = None
        self._result: Any = _NOTHING
        self._error: BaseException | None = None
        self._is_interrupted = False
        self._is_over = False
        self.is_left = False

    def run(self, call: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """Return the result of a call. One caller at a time.

        Args:
            call: Function to run.
            timeout_s: Longest wait, seconds of real time.
            what: Name of the peer, for error messages.

        Raises:
            TransferError: ``deadline`` or ``cancelled``: the call was abandoned. ``unreachable``: too many calls are
                abandoned.
            Exception: Any exception that the call raised.
        """
        if not self._left.has_room:
            raise TransferError(
                f"{self._left.number} calls on {what} have not come back.", cause=TransferCause.UNREACHABLE
            )
        with self._changed:
            if self._is_over:
                raise TransferError(f"the calls on {what} were ended.", cause=TransferCause.CANCELLED)
            self._begin(call)
            self._changed.wait_for(lambda: self._is_returned or self._is_interrupted, timeout_s)
            if not self._is_returned:
                self._leave()
                cause = TransferCause.CANCELLED if self._is_interrupted else TransferCause.DEADLINE
                how = "was interrupted" if self._is_interrupted else f"did not return within {timeout_s:g} s"
                raise TransferError(f"a call on {what} {how}.", cause=cause)
            self._call = None
            if self._error is not None:
                raise self._error
            result: T = self._result
            return result

    def interrupt(self) -> None:
        """Abandon the running call, if there is one. From any thread."""
        with self._changed:
            if self._call is not None and not self._is_returned:
                self._is_interrupted = True
                self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and wait for it, unless a call was abandoned. Not while a call runs; may be called twice."""
        with self._changed:
            was_over, self._is_over = self._is_over, True
            self._changed.notify_all()
        if self._thread is None and not was_over:
            self._on_end()
        elif self._thread is not None and not self.is_left:
            self._thread.join()

    @property
    def _is_returned(self) -> bool:
        return self._result is not _NOTHING or self._error is not None

    def _begin(self, call: Callable[[], Any]) -> None:
        self._call, self._result, self._error, self._is_interrupted = call, _NOTHING, None, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _leave(self) -> None:
        self.is_left = self._is_over = True
        self._left.add(1)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            result: Any = _NOTHING
            error: BaseException | None = None
            try:
                result = call()
            except BaseException as raised:  # raised again on the caller's thread
                error = raised
            with self._changed:
                self._result, self._error = result, error
                self._changed.notify_all()
        self._on_end()
        if self.is_left:
            self._left.add(-1)

    def _next(self) -> Callable[[], Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or (self._call is not None and not self._is_returned))
            return None if self._is_over else self._call
