"""Supervisor of the engine: opens it while the server already listens, watches it, and restarts it when it ends.

loading ─▶ serving ─ends by itself─▶ restarting ─▶ serving
│                                     └─too often, or impossible─▶ failed: `run` raises, the server ends and says why
└─cannot be opened─▶ `run` raises as well
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from trencadis.clock import Clock, SystemClock
from trencadis.errors import ConfigError, EngineEndedError, TrencadisError
from trencadis.processes import RestartLimit
from trencadis_server.errors import EngineUnavailableError

if TYPE_CHECKING:
    from trencadis import AsyncLLM

__all__ = ["Supervisor"]

logger = logging.getLogger("trencadis.server")

_Absence: TypeAlias = Callable[[], EngineUnavailableError]
"""Makes a new error each time: one that is raised twice would gather the frames of both."""

_WATCH_S = 0.1
_LOADING_RETRY_S = 5.0
_MAX_BACKOFF_S = 30.0


class Supervisor:
    """Opens, watches and restarts the engine; the :class:`trencadis_server.context.EngineSource` of a server. Event loop only.

    Args:
        open_llm: Opens an engine; blocks, and runs on a thread of its own.
        max_restarts: Maximum number of replacements, within ``window_s``, of engines that ended by themselves.
        window_s: Seconds of service for which an end counts; loading time is not counted, so that an engine that takes
            long to load and dies at once runs out of restarts, too.
        clock: Measures the time of service; None: the system's.
        on_restart: Called at each replacement.
        on_open: Called with each engine that has been opened.
        watch_s: Interval at which the engine is checked, seconds.
        backoff_s: Pause before a replacement, seconds, if one other end counts besides the last one; doubles with each
            further end, up to 30 s. If no other end counts, the engine is replaced at once.

    Attributes:
        num_restarts: Replacements since the start.
        is_serving: Set while an engine is open.
    """

    def __init__(
        self,
        open_llm: Callable[[], AsyncLLM],
        *,
        max_restarts: int,
        window_s: float = 600.0,
        clock: Clock | None = None,
        on_restart: Callable[[], None] = lambda: None,
        on_open: Callable[[AsyncLLM], None] = lambda _: None,
        watch_s: float = _WATCH_S,
        backoff_s: float = 1.0,
    ) -> None:
        self._open_llm = open_llm
        self._window_s = window_s
        self._clock = clock or SystemClock()
        self._served_s = 0.0
        self._opened_s = 0.0
        self._limit = RestartLimit(max_restarts=max_restarts, window_s=window_s, now_s=lambda: self._now_s)
        self._on_restart = on_restart
        self._on_open = on_open
        self._watch_s = watch_s
        self._backoff_s = backoff_s
        self._llm: AsyncLLM | None = None
        self._absence = _absence("loading", "The engine is loading.", _LOADING_RETRY_S)
        self._closing = asyncio.Event()
        self.num_restarts = 0
        self.is_serving = asyncio.Event()

    @property
    def llm(self) -> AsyncLLM:
        """The engine that serves now.

        Raises:
            EngineEndedError: No engine serves; the message says why.
        """
        if self._llm is None:
            raise self._absence()
        if not self._llm.is_alive:
            raise self._after(self._llm.failure, num_ends=self._limit.num_recent + 1)()
        return self._llm

    @property
    def is_closing(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closing.is_set()

    async def run(self) -> None:
        """Keep an engine open until :meth:`close` is called.

        Raises:
            TrencadisError: The first engine could not be opened.
            ConfigError: Another engine could not be opened, and trying again would not help.
            EngineEndedError: Engines ended too often.
        """
        await self._open()
        while not self._closing.is_set():
            await self._wait(self._watch_s)
            if self._llm is not None and not self._llm.is_alive and not self._closing.is_set():
                await self._replace(self._llm.failure)

    async def close(self) -> None:
        """Close the engine, which ends every request; may be called twice, and while an engine is being opened."""
        self._closing.set()
        self.is_serving.clear()
        self._absence = _absence("closed", "The server is shutting down.", 1.0)
        llm, self._llm = self._llm, None
        if llm is not None:
            await llm.close()

    async def _open(self) -> None:
        opened = await _on_own_thread(self._open_llm)
        if self._closing.is_set():
            await opened.close()
            return
        self._llm = opened
        self._opened_s = self._clock.now_s()
        self.is_serving.set()
        self._on_open(opened)

    async def _replace(self, failure: str) -> None:
        """Open engines until one starts or too many have ended."""
        self.is_serving.clear()
        logger.error("The engine has ended: %s", failure)
        self._served_s, self._opened_s = self._now_s, self._clock.now_s()
        while not self._closing.is_set():
            is_within_limit, num_ends = self._limit.note(), self._limit.num_recent
            self._absence = self._after(failure, num_ends=num_ends)
            ended, self._llm = self._llm, None
            if ended is not None:
                await ended.close()
            if not is_within_limit:
                logger.error("%s", self._absence())
                raise self._absence()
            if pause_s := self._pause_s(num_ends):
                await self._wait(pause_s)
            if self._closing.is_set():
                return
            self.num_restarts += 1
            self._on_restart()
            logger.warning("Starting the engine again (%d of %d).", num_ends, self._limit.max_restarts)
            try:
                await self._open()
                return
            except ConfigError as error:
                # A wrong configuration does not correct itself.
                self._absence = _absence("failed", f"The engine cannot be started again: {error}", None)
                raise
            except (TrencadisError, OSError) as error:  # OSError: no process, descriptor or file is available now
                failure = str(error)
                logger.error("The engine could not be started again: %s", failure)

    @property
    def _now_s(self) -> float:
        """Seconds of service so far."""
        return self._served_s + (self._clock.now_s() - self._opened_s if self._llm is not None else 0.0)

    def _pause_s(self, num_ends: int) -> float:
        return min(self._backoff_s * 2.0 ** (num_ends - 2), _MAX_BACKOFF_S) if num_ends > 1 else 0.0

    def _after(self, failure: str, *, num_ends: int) -> _Absence:
        """Return the state after an engine ended: restarting, or failed if too many ended recently. Pure."""
        if num_ends <= self._limit.max_restarts:
            retry_after_s = self._pause_s(num_ends) + _LOADING_RETRY_S
            return _absence("restarting", f"The engine is being started again: {failure}", retry_after_s)
        limit = f"server.max_engine_restarts = {self._limit.max_restarts} within server.restart_window_s = {self._window_s:g}"
        return _absence("failed", f"The engine has ended and is not started again ({limit}): {failure}", None)

    async def _wait(self, seconds: float) -> None:
        """Wait for a time, or until :meth:`close`."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            pass


def _absence(state: str, message: str, retry_after_s: float | None) -> _Absence:
    return functools.partial(EngineUnavailableError, message, state=state, retry_after_s=retry_after_s)


async def _on_own_thread(open_llm: Callable[[], AsyncLLM]) -> AsyncLLM:
    """Run a call that may take minutes on a daemon thread, which does not delay the server's exit."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[AsyncLLM] = loop.create_future()

    def work() -> None:
        try:
            llm = open_llm()
        except BaseException as error:
            _tell(loop, opened, None, error)
        else:
            if not _tell(loop, opened, llm, None):
                asyncio.run(llm.close())

    threading.Thread(target=work, name="trencadis-open", daemon=True).start()
    return await opened


def _tell(
    loop: asyncio.AbstractEventLoop, opened: asyncio.Future[AsyncLLM], llm: AsyncLLM | None, error: BaseException | None
) -> bool:
    """Pass a result to the event loop; returns whether it is still awaited."""

    def settle() -> None:
        # Cancelled: the loop is about to end, and the process with it.
        if opened.cancelled():
            return
        if llm is None:
            opened.set_exception(error or EngineEndedError("the engine was not opened."))
        else:
            opened.set_result(llm)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return False
    return True
