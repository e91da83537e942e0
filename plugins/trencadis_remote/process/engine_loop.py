"""Engine loop: runs a remote engine's client on the event loop of its users, without a thread and with one wake-up per step.

    coroutine ──▶ socket ══▶ worker        worker ══▶ socket ──▶ loop: read, step, put ──▶ OutputStream ──▶ coroutine

The loop watches the socket and the end of the process. The first loop that sends a command serves; when it has ended, the next.
If several are in use at a time, a loop on a thread of its own serves instead, and commands and outputs go from loop to loop.
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

from trencadis.client.client_request import ClientRequest
from trencadis.client.dispatcher import (
    Abort,
    Command,
    ControlRequest,
    Embed,
    MetricsRequest,
    RequestDispatcher,
    Submission,
    engine_ended,
)
from trencadis.client.frontend import Frontend
from trencadis.client.output_stream import OutputStream, running_loop
from trencadis.errors import EngineEndedError
from trencadis_remote.process.client import PolledEngineClient

__all__ = ["EngineLoop"]

logger = logging.getLogger("trencadis")


_LOOK_S = 0.1


class EngineLoop:
    """Runs a frontend with a remote engine on an event loop. Public methods may be called from any thread.

    Args:
        frontend: Serves the requests, over a ``PolledEngineClient`` whose channels never wait to send.

    Attributes:
        frontend: The frontend.
        dispatcher: Dispatcher of the loop's requests.
    """

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self.dispatcher = RequestDispatcher(frontend)
        self._engine = cast("PolledEngineClient", frontend.engine)
        # Held while the engine is used: at most for one turn.
        self._lock = threading.RLock()
        self._commands: deque[Command] = deque()
        self._end: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._closed = threading.Event()

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or has failed."""
        with self._lock:
            if self._end is None and not self._is_served:
                self._check_end()
            return self._end is None

    @property
    def failure(self) -> str:
        """Why the engine ended; empty while it is alive."""
        return "" if self.is_alive else str(self._end)

    @property
    def stalled(self) -> str:
        """Where the engine has made no progress for too long; empty while all is well."""
        return self._engine.stalled

    def send(self, command: Submission | Embed | MetricsRequest | ControlRequest) -> None:
        """Execute a command of a coroutine; the answer, or a refusal, reaches its stream or future.

        Raises:
            EngineEndedError: The engine was closed or has failed; the cause is attached.
        """
        here = asyncio.get_running_loop()
        with self._lock:
            if self._end is not None:
                raise engine_ended(self._end)
            if isinstance(command, Submission):
                self.dispatcher.register(command.stream)
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

    # ------------------------------------------------------------------------------------------- which loop serves

    @property
    def _is_served(self) -> bool:
        return self._loop is not None and (self._loop is self._own_loop or self._loop.is_running())

    def _serve_from(self, here: asyncio.AbstractEventLoop) -> None:
        """Execute the queued commands on the loop that serves; ``here`` is the running one."""
        if not self._is_served:
            self._detach()
            self._attach(here)
        if self._loop is here:
            self._turn()
            return
        self._call(self._turn if self._loop is self._own_loop else self._start_own_loop)
        here.call_later(_LOOK_S, self._check_served, here)

    def _check_served(self, here: asyncio.AbstractEventLoop) -> None:
        """Execute commands that wait for a loop that has ended meanwhile."""
        with self._lock:
            if self._end is None and self._commands:
                self._serve_from(here)

    def _start_own_loop(self) -> None:
        """Start a loop on a thread of its own and let it serve."""
        with self._lock:
            if self._end is None and self._own_loop is None:
                self._detach()
                self._loop = self._own_loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._own_loop,), name="trencadis-engine", daemon=True).start()
                self._own_loop.call_soon_threadsafe(self._attach_own_loop)

    def _attach_own_loop(self) -> None:
        with self._lock:
            if self._end is None and self._own_loop is not None:
                self._attach(self._own_loop)
                self._turn()

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._engine.socket_file, self._turn)
        loop.add_reader(self._engine.end_file, self._read_end)
        self.dispatcher.drop_unread()

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

    def _call(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed: the next takes its place
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)

    # ------------------------------------------------------------------------------------------- turns

    def _turn(self) -> None:
        """Execute the queued commands and process the received messages; does not wait."""
        with self._lock:
            if self._end is not None:
                return
            try:
                while self._commands:
                    self.dispatcher.execute(self._commands.popleft())
                if self._engine.receive():
                    self._deliver()
                if self._engine.has_rest and self._loop is not None:
                    self._loop.call_soon_threadsafe(self._turn)  # other callbacks of the loop run first
            except BaseException as error:
                self._fail(error)

    def _deliver(self) -> None:
        """Process all received steps, then deliver once: a loop that is late sends what has come together."""
        changed: dict[ClientRequest, None] = {}
        try:
            has_outputs = True
            while has_outputs:
                changed |= dict.fromkeys(self.frontend.step())
                has_outputs = self._engine.has_outputs
        finally:
            self.dispatcher.deliver(changed)

    def _check_end(self) -> None:
        """Detect the end of the process while no loop does; called with the lock."""
        if select.select([self._engine.end_file], [], [], 0)[0]:
            self._read_end()

    def _read_end(self) -> None:
        """Process the last messages of a process that has ended, or fail if there are none."""
        with self._lock:
            if self._end is not None:
                return
            try:
                self._engine.receive_last()
            except BaseException as error:
                self._fail(error)
            else:
                self._turn()

    def _fail(self, error: BaseException) -> None:
        """Answer every request with the error; closing may take a while and is done on a thread."""
        if isinstance(error, EngineEndedError):
            logger.error("%s Every request ends.", error)
        else:
            logger.error("The engine failed; every request ends.", exc_info=error)
        self._end = error
        self._detach()
        self.dispatcher.fail_all(error)
        threading.Thread(target=self._close_frontend, name="trencadis-close", daemon=True).start()

    def _close_frontend(self) -> None:
        """Close, and answer every running and queued request."""
        try:
            self.frontend.close()
        except Exception:
            logger.exception("The engine could not be closed in order.")
        end = self._end or EngineEndedError("the engine was closed.")
        self.dispatcher.deliver_finished()
        self.dispatcher.fail_all(end)
        while self._commands:
            self.dispatcher.reject(self._commands.popleft(), end)
        if self._own_loop is not None:
            self._own_loop.call_soon_threadsafe(self._own_loop.stop)
        self._closed.set()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
