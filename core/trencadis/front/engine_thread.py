"""A thread that owns an engine, or the client of one: commands go in through a queue, outputs go out to event loops.

    coroutine ──submit, abort──▶ queue ──▶ engine thread: drain queue, step, deliver ──▶ OutputStream ──▶ coroutine

Without work the thread is asleep and costs nothing.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from trencadis.errors import EngineEndedError, InternalError, RequestError, TrencadisError
from trencadis.front.client_request import ClientRequest
from trencadis.front.commands import Abort, AskMetrics, Command, Embed, End, Submission
from trencadis.front.frontend import Frontend
from trencadis.front.output_stream import OutputStream, deliver

__all__ = ["EngineThread"]

logger = logging.getLogger("trencadis")


class EngineThread:
    """Runs a frontend on its own thread. Public methods may be called from any thread.

    Args:
        make_frontend: Builds it, on that thread, where everything else of the engine runs, too.

    Raises:
        TrencadisError: Whatever ``make_frontend`` raises.
    """

    def __init__(self, make_frontend: Callable[[], Frontend]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._end: BaseException | None = None
        self._ready = threading.Event()
        self._unfinished: set[OutputStream] = set()
        self._streams: dict[ClientRequest, OutputStream] = {}
        self._futures: set[Future[Any]] = set()
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

    @property
    def failure(self) -> str:
        """Why the engine ended, in words; empty while it is alive."""
        return "" if self._end is None else str(self._end)

    @property
    def num_live(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._unfinished)

    def submit(self, submission: Submission) -> None:
        """Queue a request; a refusal reaches its stream.

        Raises:
            EngineEndedError: The engine was closed or has failed; the cause is attached.
        """
        self._send(submission)

    def embed(self, command: Embed) -> None:
        """Queue texts to embed; vectors or an error reach the command's future.

        Raises:
            EngineEndedError: As of :meth:`submit`.
        """
        self._send(command)

    def request_metrics(self, command: AskMetrics) -> None:
        """Ask for what the observers measured; the text reaches the command's future.

        Raises:
            EngineEndedError: As of :meth:`submit`.
        """
        self._send(command)

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

    def _send(self, command: Submission | Embed | AskMetrics) -> None:
        with self._lock:
            if self._end is not None:
                raise _after(self._end)
            if isinstance(command, Submission):
                self._unfinished.add(command.stream)
            self._commands.put(command)
        self.frontend.engine.interrupt()

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
                else:
                    frontend.engine.rest()
            end: BaseException = EngineEndedError("the engine was closed.")
        except EngineEndedError as error:
            logger.error("%s Every request ends.", error)
            end = error
        except BaseException as error:
            logger.exception("The engine failed; every request ends.")
            end = error
        self._finish(frontend, end)

    def _obey(self, frontend: Frontend) -> bool:
        """Carry out what is queued. False: end."""
        while not self._commands.empty():
            match command := self._commands.get():
                case Submission():
                    self._start(frontend, command)
                case Abort():
                    self._stop(frontend, command)
                case Embed() | AskMetrics():
                    self._ask(frontend, command)
                case End():
                    return False
        return True

    def _start(self, frontend: Frontend, submission: Submission) -> None:
        try:
            client = frontend.submit(
                submission.prompt,
                submission.params,
                request_id=submission.request_id,
                priority=submission.priority,
                tenant=submission.tenant,
                cache_salt=submission.cache_salt,
                streams=submission.streams,
            )
        except RequestError as error:
            self._fail([submission.stream], error)
            return
        except BaseException as error:
            self._fail([submission.stream], _after(error))
            raise
        self._streams[client] = submission.stream

    def _ask(self, frontend: Frontend, command: Embed | AskMetrics) -> None:
        """Ask the engine for what the command's future will hold; nobody may wait for a question that failed."""
        future: Future[Any] = command.future
        if not future.set_running_or_notify_cancel():
            return
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        try:
            match command:
                case Embed(prompts=prompts, request_id=request_id):
                    frontend.embed(prompts, request_id=request_id, future=future)
                case AskMetrics():
                    frontend.engine.request_metrics(future.set_result)
        except RequestError as error:
            future.set_exception(error)

    def _stop(self, frontend: Frontend, command: Abort) -> None:
        client = frontend.find(command.request_id)
        if client is None:
            frontend.drop_embeddings(command.request_id)
        if client is None or (command.only is not None and self._streams.get(client) is not command.only):
            return
        frontend.abort(client)
        if client.is_finished:
            self._report([client])

    def _report(self, changed: Iterable[ClientRequest]) -> None:
        calls: list[tuple[OutputStream, Callable[[], None]]] = []
        for client in changed:
            stream = self._streams.get(client)
            if stream is None:
                continue
            if client.is_finished:
                del self._streams[client]
                self._unfinished.discard(stream)
            if client.refusal is not None:
                calls.append((stream, functools.partial(stream.fail, client.refusal)))
            else:
                calls.append((stream, functools.partial(stream.put, client.output())))
        unread = set(deliver(calls))
        if unread:
            for client in [client for client, stream in self._streams.items() if stream in unread]:
                self.frontend.abort(client)
                self._unfinished.discard(self._streams.pop(client))

    # ----------------------------------------------------------------------------------------------------- the end

    def _finish(self, frontend: Frontend, end: BaseException) -> None:
        """Close, and let nobody wait for ever: not those who run, and not those who queue."""
        with self._lock:
            self._end = end
        if not isinstance(end, EngineEndedError):
            self._fail_running(end)
        try:
            frontend.close()
        except Exception:
            logger.exception("The engine could not be closed in order.")
        self._report([client for client in self._streams if client.is_finished])
        self._fail_running(end)
        while not self._commands.empty():
            match self._commands.get():
                case Submission() as command:
                    self._fail([command.stream], _after(end))
                case Embed(future=future) | AskMetrics(future=future):
                    self._futures.add(future)
        self._fail_running(end)

    def _fail_running(self, end: BaseException) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        self._fail(streams, _after(end))
        for future in tuple(self._futures):
            if not future.done():
                future.set_exception(_after(end))

    def _fail(self, streams: Iterable[OutputStream], error: TrencadisError) -> None:
        streams = list(streams)
        self._unfinished.difference_update(streams)
        deliver((stream, functools.partial(stream.fail, error)) for stream in streams)


def _after(end: BaseException) -> EngineEndedError:
    """Return what a request is told after the engine has ended: an error of its own, with the cause attached. Pure."""
    error = EngineEndedError(f"the engine has ended: {end}")
    error.__cause__ = end
    return error
