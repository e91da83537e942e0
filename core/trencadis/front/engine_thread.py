"""A thread that owns an engine: commands go in through a queue, outputs go out to event loops.

    coroutine ──submit, abort──▶ queue ──▶ engine thread: drain queue, step, deliver ──▶ OutputStream ──▶ coroutine

Without work the thread is blocked in the queue and costs nothing.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs

from trencadis.errors import BackendError, InternalError, RequestError
from trencadis.front.client_request import ClientRequest
from trencadis.front.frontend import Frontend
from trencadis.front.output_stream import OutputStream, deliver
from trencadis.front.prompts import Prompt
from trencadis.records import SamplingParams

__all__ = ["EngineThread", "Submission"]

logger = logging.getLogger("trencadis")

_TRANSFER_POLL_S = 0.001


@attrs.frozen(kw_only=True, eq=False)
class Submission:
    """A request on its way to the engine, and where its outputs go.

    Attributes:
        prompt: Text or token ids.
        params: How to continue it.
        request_id: Unique among live requests.
        priority: Smaller is more urgent.
        tenant: Who asks.
        streams: Deliver every change, not only the end.
        stream: Gets the outputs.
    """

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int
    tenant: str
    streams: bool
    stream: OutputStream


@attrs.frozen(kw_only=True)
class _Abort:
    request_id: str
    only: OutputStream | None


_Command: TypeAlias = Submission | _Abort | None
"""None: end."""


class EngineThread:
    """Runs a frontend on its own thread. Public methods may be called from any thread.

    Args:
        make_frontend: Builds it, on that thread, where everything else of the engine runs, too.

    Raises:
        TrencadisError: Whatever ``make_frontend`` raises.
    """

    def __init__(self, make_frontend: Callable[[], Frontend]) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._end: BaseException | None = None
        self._ready = threading.Event()
        self._streams: dict[ClientRequest, OutputStream] = {}
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
        """What the thread runs; from other threads only its constant facts may be read."""
        if self._frontend is None:
            raise InternalError("the engine is not ready.")
        return self._frontend

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or has failed."""
        return self._end is None

    def submit(self, submission: Submission) -> None:
        """Queue a request; a refusal reaches its stream.

        Raises:
            BackendError: The engine was closed or has failed; the cause is attached.
        """
        with self._lock:
            if self._end is not None:
                raise _after(self._end)
            self._commands.put(submission)

    def abort(self, request_id: str, *, only: OutputStream | None = None) -> None:
        """End a request; its stream gets what there is. Nothing happens if it has ended.

        Args:
            request_id: The client's.
            only: Leave the request alone if its outputs go elsewhere: the id may have been used again.
        """
        self._commands.put(_Abort(request_id=request_id, only=only))

    def close(self) -> None:
        """End every request, close the engine, and wait for the thread; may be called twice."""
        self._commands.put(None)
        self._thread.join()

    # ----------------------------------------------------------------------------------------- the engine's thread

    def _main(self, make_frontend: Callable[[], Frontend]) -> None:
        try:
            frontend = self._frontend = make_frontend()
        except BaseException as error:
            self._end = error
            return
        finally:
            self._ready.set()
        try:
            while self._obey(frontend):
                if frontend.has_work:
                    self._report(frontend.step())
            end: BaseException = BackendError("the engine was closed.")
        except BaseException as error:
            logger.exception("The engine failed; every request ends.")
            end = error
            self._fail_running(end)
        self._finish(frontend, end)

    def _obey(self, frontend: Frontend) -> bool:
        """Carry out what is queued; with nothing else to do, wait for something. False: end."""
        while True:
            try:
                command = self._next_command(frontend)
            except queue.Empty:
                return True
            match command:
                case Submission():
                    self._start(frontend, command)
                case _Abort():
                    self._stop(frontend, command)
                case None:
                    return False
            if frontend.has_work and self._commands.empty():
                return True

    def _next_command(self, frontend: Frontend) -> _Command:
        if not frontend.has_work:
            return self._commands.get()
        if frontend.engine.is_stalled:
            return self._commands.get(timeout=_TRANSFER_POLL_S)
        return self._commands.get_nowait()

    def _start(self, frontend: Frontend, submission: Submission) -> None:
        try:
            client = frontend.submit(
                submission.prompt,
                submission.params,
                request_id=submission.request_id,
                priority=submission.priority,
                tenant=submission.tenant,
                streams=submission.streams,
            )
        except RequestError as error:
            deliver([(submission.stream, functools.partial(submission.stream.fail, error))])
            return
        self._streams[client] = submission.stream

    def _stop(self, frontend: Frontend, command: _Abort) -> None:
        client = frontend.find(command.request_id)
        if client is None or (command.only is not None and self._streams.get(client) is not command.only):
            return
        frontend.abort(client)
        self._report([client])

    def _report(self, changed: Iterable[ClientRequest]) -> None:
        calls: list[tuple[OutputStream, Callable[[], None]]] = []
        for client in changed:
            stream = self._streams.get(client)
            if stream is not None:
                calls.append((stream, functools.partial(stream.put, client.output())))
            if client.is_finished:
                self._streams.pop(client, None)
        unread = set(deliver(calls))
        if unread:
            for client in [client for client, stream in self._streams.items() if stream in unread]:
                self.frontend.abort(client)
                del self._streams[client]

    # ----------------------------------------------------------------------------------------------------- the end

    def _finish(self, frontend: Frontend, end: BaseException) -> None:
        """Close, and let nobody wait for ever: not those who run, and not those who queue."""
        with self._lock:
            self._end = end
        try:
            frontend.close()
        except Exception:
            logger.exception("The engine could not be closed in order.")
        self._report([client for client in self._streams if client.is_finished])
        self._fail_running(end)
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submission):
                deliver([(command.stream, functools.partial(command.stream.fail, _after(end)))])

    def _fail_running(self, end: BaseException) -> None:
        deliver((stream, functools.partial(stream.fail, _after(end))) for stream in self._streams.values())
        self._streams.clear()


def _after(end: BaseException) -> BackendError:
    """Return what a request is told after the engine has ended: an error of its own, with the cause attached. Pure."""
    error = BackendError(f"the engine has ended: {end}")
    error.__cause__ = end
    return error
