"""A thread that owns an engine: commands go in through a queue, outputs go out to event loops.

    coroutine ──submit, abort──▶ queue ──▶ engine thread: drain queue, step, deliver ──▶ OutputStream ──▶ coroutine

Without work the thread is asleep and costs nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from trencadis.client.dispatcher import (
    Abort,
    Command,
    ControlRequest,
    Embed,
    End,
    MetricsRequest,
    RequestDispatcher,
    Submission,
    engine_ended,
)
from trencadis.client.frontend import Frontend
from trencadis.client.output_stream import OutputStream
from trencadis.errors import EngineEndedError, InternalError

__all__ = ["EngineThread"]

logger = logging.getLogger("trencadis")


class EngineThread:
    """Runs a frontend on its own thread. Public methods may be called from any thread.

    Args:
        make_frontend: Builds it; called on that thread, on which the engine runs.

    Raises:
        TrencadisError: Whatever ``make_frontend`` raises.
    """

    def __init__(self, make_frontend: Callable[[], Frontend]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._end: BaseException | None = None
        self._ready = threading.Event()
        self._dispatcher: RequestDispatcher | None = None
        self._frontend: Frontend | None = None
        # A daemon, so that a program that forgets to close still ends.
        self._thread = threading.Thread(target=self._main, args=(make_frontend,), name="trencadis-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._frontend is None:
            self._thread.join()
            raise self._end or InternalError("the engine's thread ended before it was ready.")

    @property
    def frontend(self) -> Frontend:
        """The frontend; from other threads only its constants may be read."""
        if self._frontend is None:
            raise InternalError("the engine is not ready.")
        return self._frontend

    @property
    def dispatcher(self) -> RequestDispatcher:
        """The request dispatcher."""
        if self._dispatcher is None:
            raise InternalError("the engine is not ready.")
        return self._dispatcher

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or has failed."""
        return self._end is None

    @property
    def failure(self) -> str:
        """Why the engine ended; empty while it is alive."""
        return "" if self._end is None else str(self._end)

    @property
    def stalled(self) -> str:
        """Always empty: only an engine in a process of its own is watched."""
        return ""

    def send(self, command: Submission | Embed | MetricsRequest | ControlRequest) -> None:
        """Queue a command; the answer, or a refusal, reaches its stream or future.

        Raises:
            EngineEndedError: The engine was closed or has failed; the cause is attached.
        """
        with self._lock:
            if self._end is not None:
                raise engine_ended(self._end)
            if isinstance(command, Submission):
                self.dispatcher.register(command.stream)
            self._commands.put(command)
        self.frontend.engine.interrupt()

    def abort(self, request_id: str, *, only: OutputStream | None = None) -> None:
        """End a request; its stream gets what there is. Texts to embed are forgotten. Nothing happens if it has ended.

        Args:
            request_id: The client's.
            only: Leave the request alone if its outputs go elsewhere: the id may have been used again.
        """
        self._commands.put(Abort(request_id=request_id, only=only))
        self.frontend.engine.interrupt()

    def close(self) -> None:
        """End every request, close the engine, and wait for the thread; may be called twice."""
        self._commands.put(End())
        self.frontend.engine.interrupt()
        self._thread.join()

    # ----------------------------------------------------------------------------------------- the engine's thread

    def _main(self, make_frontend: Callable[[], Frontend]) -> None:
        try:
            frontend = make_frontend()
            dispatcher = self._dispatcher = RequestDispatcher(frontend)
            self._frontend = frontend
        except BaseException as error:
            self._end = error
            return
        finally:
            self._ready.set()
        try:
            while self._execute(dispatcher):
                if frontend.has_work:
                    dispatcher.deliver(frontend.step())
                else:
                    frontend.engine.rest()
            end: BaseException = EngineEndedError("the engine was closed.")
        except EngineEndedError as error:
            logger.error("%s Every request ends.", error)
            end = error
        except BaseException as error:
            logger.exception("The engine failed; every request ends.")
            end = error
        self._finish(frontend, dispatcher, end)

    def _execute(self, dispatcher: RequestDispatcher) -> bool:
        """Execute the queued commands. False: end."""
        while not self._commands.empty():
            if not dispatcher.execute(self._commands.get()):
                return False
        return True

    def _finish(self, frontend: Frontend, dispatcher: RequestDispatcher, end: BaseException) -> None:
        """Close, and answer every running and queued request."""
        with self._lock:
            self._end = end
        if not isinstance(end, EngineEndedError):
            dispatcher.fail_all(end)
        try:
            frontend.close()
        except Exception:
            logger.exception("The engine could not be closed in order.")
        dispatcher.deliver_finished()
        dispatcher.fail_all(end)
        while not self._commands.empty():
            dispatcher.reject(self._commands.get(), end)
