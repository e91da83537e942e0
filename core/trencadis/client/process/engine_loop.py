"""An engine in another process, served by the event loop of those who use it: no thread, no hand-over, one wake-up per step.

    coroutine ──▶ socket ══▶ host        host ══▶ socket ──▶ loop: read, step, put ──▶ OutputStream ──▶ coroutine

The loop watches the socket and the end of the process. Without work it has nothing to do.

One loop serves, the first that sends a command; when it has ended, the next. Are there several at a time, none can be relied upon:
a loop on a thread of its own takes over, and commands and outputs are handed from loop to loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import cast

from trencadis.client import Frontend
from trencadis.client.commands import Abort, Ask, AskMetrics, Command, Embed, Submission
from trencadis.client.desk import Desk, after
from trencadis.client.output_stream import OutputStream, running_loop
from trencadis.client.process.client import RemoteEngineClient
from trencadis.errors import EngineEndedError

__all__ = ["EngineLoop"]

logger = logging.getLogger("trencadis")


_LOOK_S = 0.1


class EngineLoop:
    """Runs a frontend with a remote engine on an event loop. Public methods may be called from any thread.

    Args:
        frontend: Serves the requests, over a ``RemoteEngineClient`` whose channel never waits to send.

    Attributes:
        frontend: As given.
        desk: Who waits for what.
    """

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self.desk = Desk(frontend)
        self._engine = cast("RemoteEngineClient", frontend.engine)
        # Held by whoever touches the engine. Loops that serve in turn never wait for each other longer than for a turn.
        self._lock = threading.RLock()
        self._commands: deque[Command] = deque()
        self._end: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._closed = threading.Event()

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or has failed."""
        with self._lock:
            if self._end is None and not self._is_served:
                self._look()
            return self._end is None

    @property
    def failure(self) -> str:
        """Why the engine ended, in words; empty while it is alive."""
        return "" if self.is_alive else str(self._end)

    @property
    def stalled(self) -> str:
        """Where the engine has made no progress for too long; empty while all is well."""
        return self._engine.stalled

    def send(self, command: Submission | Embed | AskMetrics | Ask) -> None:
        """Carry out a command of a coroutine; the answer, or a refusal, reaches its stream or future.

        Raises:
            EngineEndedError: The engine was closed or has failed; the cause is attached.
        """
        here = asyncio.get_running_loop()
        with self._lock:
            if self._end is not None:
                raise after(self._end)
            if isinstance(command, Submission):
                self.desk.announce(command.stream)
            self._commands.append(command)
            self._serve_from(here)

    def abort(self, request_id: str, *, only: OutputStream | None = None) -> None:
        """End a request; its stream gets what there is. Texts to embed are forgotten. Nothing happens if it has ended.

        Args:
            request_id: The client's.
            only: Leave the request alone if its outputs go elsewhere: the id may have been used again.
        """
        with self._lock:
            if self._end is None:
                self._commands.append(Abort(request_id=request_id, only=only))
                if self._is_served and self._loop is not running_loop():
                    self._call(self._turn)
                else:
                    self._turn()

    def close(self) -> None:
        """End every request and the engine, and wait for that; not for the thread of the loop; may be called twice."""
        with self._lock:
            is_first, loop = self._end is None, self._loop
            self._end = self._end or EngineEndedError("the engine was closed.")
        if is_first:
            self._leave(loop)
            self._close_frontend()
        self._closed.wait()

    # ------------------------------------------------------------------------------------------- who serves

    @property
    def _is_served(self) -> bool:
        return self._loop is not None and (self._loop is self._home or self._loop.is_running())

    def _serve_from(self, here: asyncio.AbstractEventLoop) -> None:
        """Carry out what is queued, on the loop that serves; ``here`` is the running one."""
        if not self._is_served:
            self._detach()
            self._attach(here)
        if self._loop is here:
            self._turn()
            return
        self._call(self._turn if self._loop is self._home else self._go_home)
        here.call_later(_LOOK_S, self._look_after, here)

    def _look_after(self, here: asyncio.AbstractEventLoop) -> None:
        """Make sure that commands do not wait for a loop that has ended meanwhile."""
        with self._lock:
            if self._end is None and self._commands:
                self._serve_from(here)

    def _go_home(self) -> None:
        """Let a loop serve that does not end before the engine."""
        with self._lock:
            if self._end is None and self._home is None:
                self._detach()
                self._loop = self._home = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._home,), name="trencadis-engine", daemon=True).start()
                self._home.call_soon_threadsafe(self._attach_home)

    def _attach_home(self) -> None:
        with self._lock:
            if self._end is None and self._home is not None:
                self._attach(self._home)
                self._turn()

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._engine.socket_file, self._turn, True)
        loop.add_reader(self._engine.end_file, self._read_end)
        self.desk.drop_unread()

    def _detach(self) -> None:
        """Leave a loop, on its thread or while it rests."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._engine.socket_file)
            self._loop.remove_reader(self._engine.end_file)
        self._loop = None

    def _leave(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Leave a loop from another thread."""
        left = threading.Event()

        def leave() -> None:
            self._detach()
            left.set()

        with contextlib.suppress(RuntimeError):  # it is closed
            if loop is not None:
                loop.call_soon_threadsafe(leave)
                while loop.is_running() and not left.wait(_LOOK_S):
                    pass
        if not left.is_set():
            self._detach()

    def _call(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed: the next takes its place
            if self._loop is not None:
                self._loop.call_soon_threadsafe(what)

    # ------------------------------------------------------------------------------------------- what it does

    def _turn(self, is_likely: bool = False) -> None:
        """Carry out what is queued and take in what has come, which is likely if the socket says so; does not wait."""
        with self._lock:
            if self._end is not None:
                return
            try:
                while self._commands:
                    self.desk.obey(self._commands.popleft())
                    is_likely = False  # what was sent may have taken notice of what the socket says
                # Also after sending: the socket's file tells only once that something has come, and sending may take notice.
                has_news = self._engine.take_in(is_likely=is_likely)
                while has_news:
                    self.desk.report(self.frontend.step())
                    has_news = self._engine.has_news
                if self._engine.has_rest and self._loop is not None:
                    self._loop.call_soon_threadsafe(self._turn)  # others of this loop come first
            except BaseException as error:
                self._fail(error)

    def _look(self) -> None:
        """Look after the engine while no loop does; whoever asks for it has the lock."""
        if select.select([self._engine.end_file], [], [], 0)[0]:
            self._read_end()

    def _read_end(self) -> None:
        """Take in the last words of a process that has ended, or learn that there are none."""
        with self._lock:
            if self._end is not None:
                return
            try:
                self._engine.take_last()
            except BaseException as error:
                self._fail(error)
            else:
                self._turn()

    def _fail(self, error: BaseException) -> None:
        """Tell everybody at once; freeing what is left may take a while and is done elsewhere."""
        if isinstance(error, EngineEndedError):
            logger.error("%s Every request ends.", error)
        else:
            logger.error("The engine failed; every request ends.", exc_info=error)
        self._end = error
        self._detach()
        self.desk.fail_all(error)
        threading.Thread(target=self._close_frontend, name="trencadis-close", daemon=True).start()

    def _close_frontend(self) -> None:
        """Close, and let nobody wait for ever."""
        try:
            self.frontend.close()
        except Exception:
            logger.exception("The engine could not be closed in order.")
        end = self._end or EngineEndedError("the engine was closed.")
        self.desk.report_finished()
        self.desk.fail_all(end)
        while self._commands:
            self.desk.refuse(self._commands.popleft(), end)
        if self._home is not None:
            self._home.call_soon_threadsafe(self._home.stop)
        self._closed.set()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
