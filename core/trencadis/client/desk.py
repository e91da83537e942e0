"""What coroutines asked of a frontend, and where the answers go; the part that does not depend on who runs the frontend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from trencadis.client.client_request import ClientRequest
from trencadis.client.commands import Abort, Ask, AskMetrics, Command, Embed, End, Submission
from trencadis.client.frontend import Frontend
from trencadis.client.output_stream import OutputStream, deliver, running_loop
from trencadis.errors import EngineEndedError, RequestError, TrencadisError

__all__ = ["Desk", "after", "settle"]


class Desk:
    """Carries out commands and hands outputs to their streams. Used by one thread at a time, but for what says otherwise.

    Args:
        frontend: Serves the requests.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._unfinished: set[OutputStream] = set()
        self._clients: set[ClientRequest] = set()
        self._futures: set[Future[Any]] = set()

    @property
    def num_live(self) -> int:
        """Requests that were announced and have not ended. From any thread."""
        return len(self._unfinished)

    @property
    def num_questions(self) -> int:
        """Texts to embed and metrics that were asked for and not answered."""
        return len(self._futures)

    def announce(self, stream: OutputStream) -> None:
        """Count a request that is on its way. From any thread."""
        self._unfinished.add(stream)

    def obey(self, command: Command) -> bool:
        """Carry out a command; what a request is at fault for reaches its reader. False: end.

        Raises:
            EngineEndedError: The engine died or hung; the reader knows.
        """
        match command:
            case Submission():
                self._start(command)
            case Abort():
                self._stop(command)
            case Embed() | AskMetrics() | Ask():
                self._ask(command)
            case End():
                return False
        return True

    def report(self, changed: Iterable[ClientRequest]) -> None:
        """Give the newest outputs to their streams; ends requests that nobody can read any more."""
        here = running_loop()
        away: list[tuple[OutputStream, Callable[[], None]]] = []
        for client in changed:
            stream = client.stream
            if stream is None:
                continue
            output = client.output()
            if output.finished:
                self._forget(client, stream)
            if client.refusal is not None:
                away.append((stream, functools.partial(stream.fail, client.refusal)))
            elif stream.loop is here:
                stream.put(output)
            else:
                away.append((stream, functools.partial(stream.put, output)))
        if away:
            unread = set(deliver(away))
            self._give_up({client for client in self._clients if client.stream in unread})

    def drop_unread(self) -> None:
        """End the requests whose loop is closed."""
        self._give_up({client for client in self._clients if client.stream and client.stream.loop.is_closed()})

    def report_finished(self) -> None:
        """Give out what ended without having been reported."""
        self.report([client for client in self._clients if client.is_finished])

    def refuse(self, command: Command, end: BaseException) -> None:
        """Tell whoever sent a command that it came too late."""
        match command:
            case Submission():
                self._fail([command.stream], after(end))
            case Embed(future=future) | AskMetrics(future=future) | Ask(future=future):
                if not future.done():
                    future.set_exception(after(end))

    def fail_all(self, end: BaseException) -> None:
        """Let nobody wait for ever: tell all who do that the engine has ended."""
        clients, self._clients = self._clients, set()
        self._fail([client.stream for client in clients if client.stream], after(end))
        for future in tuple(self._futures):
            if not future.done():
                future.set_exception(after(end))

    # ------------------------------------------------------------------------------------------------- innards

    def _start(self, submission: Submission) -> None:
        try:
            client = self._frontend.submit(
                submission.prompt,
                submission.params,
                request_id=submission.request_id,
                terms=submission.terms,
                streams=submission.streams,
            )
        except RequestError as error:
            self._fail([submission.stream], error)
            return
        except BaseException as error:
            self._fail([submission.stream], after(error))
            raise
        client.stream = submission.stream
        self._clients.add(client)

    def _ask(self, command: Embed | AskMetrics | Ask) -> None:
        """Ask the engine for what the command's future will hold; nobody may wait for a question that failed."""
        future: Future[Any] = command.future
        if not future.set_running_or_notify_cancel():
            return
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        try:
            match command:
                case Embed(prompts=prompts, request_id=request_id):
                    self._frontend.embed(prompts, request_id=request_id, future=future)
                case AskMetrics():
                    self._frontend.engine.request_metrics(future.set_result)
                case Ask(question=question, arguments=arguments):
                    self._frontend.engine.ask(question, arguments, functools.partial(settle, future))
        except RequestError as error:
            future.set_exception(error)

    def _stop(self, command: Abort) -> None:
        client = self._frontend.find(command.request_id)
        if client is None:
            embedding = self._frontend.drop_embeddings(command.request_id)
            if embedding is not None:
                # Nobody waits for it any more; a future without an end would be kept for ever.
                embedding.fail(EngineEndedError(f"request {command.request_id!r} was ended."))
        if client is None or (command.only is not None and client.stream is not command.only):
            return
        self._frontend.abort(client)
        if client.is_finished:
            self.report([client])

    def _give_up(self, clients: Iterable[ClientRequest]) -> None:
        """End requests that nobody reads any more."""
        for client in clients:
            self._frontend.abort(client)
            if client.stream is not None:
                self._forget(client, client.stream)

    def _forget(self, client: ClientRequest, stream: OutputStream) -> None:
        client.stream = None
        self._clients.discard(client)
        self._unfinished.discard(stream)

    def _fail(self, streams: Iterable[OutputStream], error: TrencadisError) -> None:
        streams = list(streams)
        self._unfinished.difference_update(streams)
        deliver((stream, functools.partial(stream.fail, error)) for stream in streams)


def settle(future: Future[Any], answer: Mapping[str, Any] | TrencadisError) -> None:
    """Give a future what an engine answered, or why it did not."""
    if isinstance(answer, TrencadisError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def after(end: BaseException) -> EngineEndedError:
    """Return what a request is told after the engine has ended: an error of its own, with the cause attached. Pure."""
    error = EngineEndedError(f"the engine has ended: {end}")
    error.__cause__ = end
    return error
