"""Request dispatcher: executes the commands of coroutines on a frontend and sends outputs back to them.

Used by :class:`trencadis.client.engine_thread.EngineThread`, and by the runners of placements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import attrs

from trencadis.client.client_request import ClientRequest
from trencadis.client.frontend import Frontend
from trencadis.client.output_stream import OutputStream, call_on_loops, running_loop
from trencadis.client.prompts import Prompt
from trencadis.errors import EngineEndedError, RequestError, TrencadisError
from trencadis.records import DEFAULT_TERMS, Embedding, RequestTerms, SamplingParams

__all__ = [
    "Abort",
    "Command",
    "ControlRequest",
    "Embed",
    "End",
    "MetricsRequest",
    "RequestDispatcher",
    "Submission",
    "engine_ended",
    "set_answer",
]


@attrs.frozen(kw_only=True, eq=False)
class Submission:
    """Generate: a request on its way to the engine, and the stream of its outputs.

    Attributes:
        prompt: Text or token ids.
        params: Sampling parameters.
        request_id: Unique among live requests.
        terms: Scheduling parameters.
        streams: Deliver every change, not only the end.
        stream: Gets the outputs.
    """

    prompt: Prompt
    params: SamplingParams
    request_id: str
    terms: RequestTerms = DEFAULT_TERMS
    streams: bool
    stream: OutputStream


@attrs.frozen(kw_only=True, eq=False)
class Embed:
    """Embed texts.

    Attributes:
        prompts: Text or token ids, each.
        request_id: Unique among all.
        future: Gets one vector for each, or an error.
    """

    prompts: Sequence[Prompt]
    request_id: str
    future: Future[list[Embedding]] = attrs.field(factory=Future)


@attrs.frozen(kw_only=True, eq=False)
class MetricsRequest:
    """Return the metrics of the observers.

    Attributes:
        future: Gets them, in Prometheus' text format.
    """

    future: Future[str] = attrs.field(factory=Future)


@attrs.frozen(kw_only=True, eq=False)
class ControlRequest:
    """Read or change the state of the engine, see :meth:`trencadis.engine.engine.Engine.answer`.

    Attributes:
        name: Which.
        arguments: Plain values by name.
        future: Gets the answer, a table, or an error.
    """

    name: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    future: Future[dict[str, Any]] = attrs.field(factory=Future)


@attrs.frozen(kw_only=True)
class Abort:
    """End a request.

    Attributes:
        request_id: The client's.
        only: Leave the request alone if its outputs go to another stream.
    """

    request_id: str
    only: OutputStream | None = None


@attrs.frozen
class End:
    """End the engine."""


Command: TypeAlias = Submission | Embed | MetricsRequest | ControlRequest | Abort | End


class RequestDispatcher:
    """Executes commands on a frontend and delivers outputs to streams. One thread at a time, except where a method says otherwise.

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
        """Requests that were registered and have not ended. From any thread."""
        return len(self._unfinished)

    @property
    def num_unanswered(self) -> int:
        """Embeddings, metrics and control requests without an answer."""
        return len(self._futures)

    def register(self, stream: OutputStream) -> None:
        """Count a request that is queued. From any thread."""
        self._unfinished.add(stream)

    def execute(self, command: Command) -> bool:
        """Execute a command; errors of a request go to its stream or future. False: end.

        Raises:
            EngineEndedError: The engine died or hung; the stream or future has the error, too.
        """
        match command:
            case Submission():
                self._submit(command)
            case Abort():
                self._abort(command)
            case Embed() | MetricsRequest() | ControlRequest():
                self._request(command)
            case End():
                return False
        return True

    def deliver(self, changed: Iterable[ClientRequest]) -> None:
        """Give the newest outputs to their streams; ends requests whose reader is gone."""
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
            unread = set(call_on_loops(away))
            self._drop({client for client in self._clients if client.stream in unread})

    def drop_unread(self) -> None:
        """End the requests whose event loop is closed."""
        self._drop({client for client in self._clients if client.stream and client.stream.loop.is_closed()})

    def deliver_finished(self) -> None:
        """Deliver the outputs of requests that ended without being reported by a step."""
        self.deliver([client for client in self._clients if client.is_finished])

    def reject(self, command: Command, end: BaseException) -> None:
        """Answer a command that came after the end of the engine with an error."""
        match command:
            case Submission():
                self._fail([command.stream], engine_ended(end))
            case Embed(future=future) | MetricsRequest(future=future) | ControlRequest(future=future):
                if not future.done():
                    future.set_exception(engine_ended(end))

    def fail_all(self, end: BaseException) -> None:
        """Answer every live request with an error, because the engine has ended."""
        clients, self._clients = self._clients, set()
        self._fail([client.stream for client in clients if client.stream], engine_ended(end))
        for future in tuple(self._futures):
            if not future.done():
                future.set_exception(engine_ended(end))

    # ------------------------------------------------------------------------------------------------- innards

    def _submit(self, submission: Submission) -> None:
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
            self._fail([submission.stream], engine_ended(error))
            raise
        client.stream = submission.stream
        self._clients.add(client)

    def _request(self, command: Embed | MetricsRequest | ControlRequest) -> None:
        """Send a command whose answer goes to a future; if it cannot be sent, the future gets the error."""
        future: Future[Any] = command.future
        if not future.set_running_or_notify_cancel():
            return
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        try:
            match command:
                case Embed(prompts=prompts, request_id=request_id):
                    self._frontend.embed(prompts, request_id=request_id, future=future)
                case MetricsRequest():
                    self._frontend.engine.request_metrics(future.set_result)
                case ControlRequest(name=name, arguments=arguments):
                    self._frontend.engine.control(name, arguments, functools.partial(set_answer, future))
        except RequestError as error:
            future.set_exception(error)

    def _abort(self, command: Abort) -> None:
        client = self._frontend.find(command.request_id)
        if client is None:
            embedding = self._frontend.drop_embeddings(command.request_id)
            if embedding is not None:
                # A future that never ends would be kept for ever.
                embedding.fail(EngineEndedError(f"request {command.request_id!r} was ended."))
        if client is None or (command.only is not None and client.stream is not command.only):
            return
        self._frontend.abort(client)
        if client.is_finished:
            self.deliver([client])

    def _drop(self, clients: Iterable[ClientRequest]) -> None:
        """End requests whose reader is gone."""
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
        call_on_loops((stream, functools.partial(stream.fail, error)) for stream in streams)


def set_answer(future: Future[Any], answer: Mapping[str, Any] | TrencadisError) -> None:
    """Set the result of a future to the answer of an engine, or its exception to the error."""
    if isinstance(answer, TrencadisError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def engine_ended(end: BaseException) -> EngineEndedError:
    """Return the error of a request after the end of the engine: a new one each time, with the cause attached. Pure."""
    error = EngineEndedError(f"the engine has ended: {end}")
    error.__cause__ = end
    return error
