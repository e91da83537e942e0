"""Outputs of one request on their way from the engine's thread to a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

from trencadis.records import RequestOutput

__all__ = ["OutputStream", "deliver"]


class OutputStream:
    """Holds the newest output until the coroutine takes it.

    Outputs are cumulative, so a slow reader misses none of the text: it sees fewer, longer steps, and nothing piles up.

    Args:
        loop: The event loop of the reader; everything here runs on it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    def put(self, output: RequestOutput) -> None:
        """Replace the newest output."""
        self._output = output
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Let the reader raise ``error``, now and ever after."""
        self._error = error
        self._wake()

    async def next(self) -> RequestOutput:
        """Wait for an output and take it. For one reader.

        Raises:
            BaseException: What :meth:`fail` was given.
        """
        while self._output is None and self._error is None:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        return cast("RequestOutput", output)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def deliver(calls: Iterable[tuple[OutputStream, Callable[[], None]]]) -> list[OutputStream]:
    """Run calls on the loops of their streams, each loop woken once; called from the engine's thread.

    Returns:
        Streams whose loop is closed: nobody reads them any more.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Callable[[], None]]]] = {}
    for stream, call in calls:
        by_loop.setdefault(stream.loop, []).append((stream, call))
    orphans: list[OutputStream] = []
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_run_all, [call for _, call in batch])
        except RuntimeError:
            orphans.extend(stream for stream, _ in batch)
    return orphans


def _run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
