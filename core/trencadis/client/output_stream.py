"""Output stream: passes the outputs of one request from the engine's thread to a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from trencadis.records import RequestOutput

__all__ = ["OutputStream", "call_on_loops", "running_loop"]


class OutputStream:
    """Holds the newest output until the coroutine takes it.

    Outputs are cumulative, so a slow reader gets the whole text in fewer outputs, and nothing piles up.

    Args:
        loop: The event loop of the reader; everything here runs on it.
        on_output: Offered each output that the reader waits for, but the finished one; True: it is done with, and the reader goes on
            waiting. None: the reader takes all.

    Attributes:
        loop: The event loop of the reader.
        is_empty: :meth:`take` would return None.
    """

    __slots__ = ("_error", "_on_output", "_output", "_waiter", "is_empty", "loop")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_output: Callable[[RequestOutput], bool] | None = None
    ) -> None:
        self.loop = loop
        self._on_output = on_output
        self.is_empty = True
        self._waiter: asyncio.Future[None] | None = None
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    def put(self, output: RequestOutput) -> None:
        """Replace the newest output."""
        waiter = self._waiter
        if self._on_output is not None and waiter is not None and not (waiter.done() or output.finished):
            try:
                if self._on_output(output):
                    return
            except Exception as error:  # no other request of this loop suffers
                self.fail(error)
                return
        self._output = output
        self.is_empty = False
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Make :meth:`take` raise ``error`` from now on."""
        self._error = error
        self.is_empty = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> RequestOutput | None:
        """Return the newest output, once; None if there is none since the last.

        Raises:
            BaseException: The error given to :meth:`fail`.
        """
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        self.is_empty = True
        return output

    def changed(self) -> asyncio.Future[None]:
        """Return a future that ends with the next output or error; for one reader."""
        waiter = self._waiter = self.loop.create_future()
        return waiter


def call_on_loops(calls: Iterable[tuple[OutputStream, Callable[[], None]]]) -> list[OutputStream]:
    """Run calls on the loops of their streams, each loop woken once; called from the engine's thread.

    Returns:
        Streams whose loop is closed.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Callable[[], None]]]] = {}
    for stream, call in calls:
        by_loop.setdefault(stream.loop, []).append((stream, call))
    unread: list[OutputStream] = []
    here = running_loop()
    for loop, batch in by_loop.items():
        if loop is here:
            _run_all([call for _, call in batch])
            continue
        try:
            loop.call_soon_threadsafe(_run_all, [call for _, call in batch])
        except RuntimeError:
            unread.extend(stream for stream, _ in batch)
    return unread


def _run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs on this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
