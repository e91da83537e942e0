"""Threads for long work, such as encoding, whose time is shared out by API key.

run ─▶ one queue for each caller, short pieces first ─▶ the caller served least ─▶ thread ─▶ result
refused: its time counts against the caller
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from trencadis.clock import Clock, SystemClock
from trencadis.failure_costs import FailureCosts
from trencadis_server.errors import TooBusyError

__all__ = ["FairThreads"]

_T = TypeVar("_T")
_MAX_INLINE_CHARACTERS = 2000
"""Characters that take about a millisecond; handing them to a thread costs a tenth of that."""
_MAX_QUOTED = 100


@attrs.define(order=True)
class _Piece:
    """Work that waits for a thread; short pieces come first, then earlier ones."""

    size: int
    number: int
    call: Callable[[], Any] = attrs.field(order=False)
    result: asyncio.Future[Any] = attrs.field(order=False)
    seconds: float = attrs.field(default=0.0, order=False)


class FairThreads:
    """Runs work on long texts on threads, off the event loop, in turn by caller. Event loop only.

    A free thread takes the shortest piece of the caller that occupies the fewest threads and, among equals, was served
    the least time. A caller that returns after a pause starts with the least served time of the others, so that nothing
    is saved up. A caller whose work is refused repeatedly is refused itself for a while, as by the engine.

    Args:
        max_threads: Maximum number of long texts at once; each may take a hundred bytes per token.
        max_inline: Longest text, characters, that is processed at once on the event loop.
        most_of_one: Threads that one caller may occupy; fewer than all if there are other callers, so that a long piece
            never holds them up; None: all.
        clock: Measures the time on threads.
        costs: Time of refused work, by caller; None: it is not counted.
    """

    def __init__(
        self,
        max_threads: int = 2,
        *,
        max_inline: int = _MAX_INLINE_CHARACTERS,
        most_of_one: int | None = None,
        clock: Clock | None = None,
        costs: FailureCosts | None = None,
    ) -> None:
        self._max_threads = max_threads
        self._max_inline = max_inline
        self._most_of_one = most_of_one or max_threads
        self._clock = clock or SystemClock()
        self._costs = costs
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix="trencadis-server")
        self._numbers = itertools.count()
        self._waiting: defaultdict[str, list[_Piece]] = defaultdict(list)
        self._running: Counter[str] = Counter()
        self._num_requests: Counter[str] = Counter()
        self._served_s: dict[str, float] = {}
        """Seconds on threads by caller, since there was last no request."""

    async def run(self, call: Callable[[], _T], *, num_characters: int, caller: str = "") -> _T:
        """Return the result of ``call``, run on a thread if the text is long.

        Args:
            call: Function that uses the tokenizer, or parses; it touches nothing else.
            num_characters: Length of its text, or of one that takes as long.
            caller: Name of the API key.

        Raises:
            TooBusyError: The text is long, and too much of the caller's work was refused recently.
        """
        (result,) = await self.run_all([(call, num_characters)], caller=caller)
        return result

    async def run_all(self, calls: Sequence[tuple[Callable[[], _T], int]], *, caller: str = "") -> list[_T]:
        """Return the results of several calls of one request, run one after the other; others may run in between.

        The first exception ends the run, and the time of all its calls counts against the caller.

        Args:
            calls: Functions, each with its number of characters.
            caller: Name of the API key.

        Raises:
            TooBusyError: The texts are long, and too much of the caller's work was refused recently.
        """
        if sum(num_characters for _, num_characters in calls) <= self._max_inline:
            return [call() for call, _ in calls]
        self.refuse_costly(caller)
        self._enter(caller)
        try:
            return await self._run_all(calls, caller)
        finally:
            self._leave(caller)

    async def _run_all(self, calls: Sequence[tuple[Callable[[], _T], int]], caller: str) -> list[_T]:
        results: list[_T] = []
        took_s = 0.0
        for call, num_characters in calls:
            piece = _Piece(num_characters, next(self._numbers), call, asyncio.get_running_loop().create_future())
            heapq.heappush(self._waiting[caller], piece)
            self._start()
            try:
                results.append(await piece.result)
            except Exception:
                self.charge(caller, took_s + piece.seconds)
                raise
            took_s += piece.seconds
        return results

    def charge(self, caller: str, seconds: float) -> None:
        """Charge time that was spent elsewhere on work of a caller that was then refused, such as at a chat template."""
        if self._costs is not None and seconds > 0:
            self._costs.charge(caller, seconds)

    def refuse_costly(self, caller: str) -> None:
        """Refuse a caller if too much of its work was refused recently.

        Raises:
            TooBusyError: Too much of the caller's work was refused; ``retry_after_s`` later it is accepted again.
        """
        retry_after_s = 0.0 if self._costs is None else self._costs.retry_after_s(caller)
        if retry_after_s:
            raise TooBusyError(
                f"Long requests of the API key {caller[:_MAX_QUOTED]!a} were refused too often, and it took long to find that out.",
                retry_after_s=retry_after_s,
            )

    def _start(self) -> None:
        """Hand pieces to free threads."""
        while self._running.total() < self._max_threads:
            free = [caller for caller in self._waiting if self._running[caller] < self._most_of_one]
            if not free:
                return
            caller = min(
                free, key=lambda one: (self._running[one], self._served_s.get(one, 0.0), self._waiting[one][0].number)
            )
            piece = heapq.heappop(self._waiting[caller])
            if not self._waiting[caller]:
                del self._waiting[caller]
            if piece.result.done():
                continue  # its request has ended
            self._running[caller] += 1
            ended = functools.partial(self._ended, caller, piece, self._clock.now_s())
            asyncio.get_running_loop().run_in_executor(self._pool, piece.call).add_done_callback(ended)

    def _enter(self, caller: str) -> None:
        """Count a request; a caller that had none starts with the least served time of the others."""
        if not self._num_requests[caller]:
            least_s = min((self._served_s[one] for one in +self._num_requests), default=0.0)
            self._served_s[caller] = max(self._served_s.get(caller, 0.0), least_s)
        self._num_requests[caller] += 1

    def _leave(self, caller: str) -> None:
        self._num_requests[caller] -= 1
        if not self._num_requests.total():
            self._served_s.clear()

    def _ended(self, caller: str, piece: _Piece, start_s: float, running: asyncio.Future[Any]) -> None:
        piece.seconds = self._clock.now_s() - start_s
        self._running[caller] -= 1
        if caller in self._served_s:
            self._served_s[caller] += piece.seconds
        if piece.result.done():
            running.exception()  # the request has ended: the result is not wanted
        elif (error := running.exception()) is not None:
            piece.result.set_exception(error)
        else:
            piece.result.set_result(running.result())
        # Called later, so that the request can queue its next piece and does not lose its turn.
        running.get_loop().call_soon(self._start)
