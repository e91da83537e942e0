"""An engine in another process, as a client sees it: it asks and goes on; answers come with later steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trencadis.client.engine_client import EngineClient
from trencadis.client.news import NO_NEWS, StepNews
from trencadis.client.process.conversion import add_message, error_of, int32_bytes, model_of, news_of
from trencadis.client.process.link import Link
from trencadis.client.process.messages import (
    AnswerMessage,
    AskMessage,
    AskMetricsMessage,
    DropMessage,
    EmbedMessage,
    EndMessage,
    FailedMessage,
    HostMessage,
    MetricsMessage,
    ReadyMessage,
    RefusedMessage,
    StepMessage,
)
from trencadis.client.process.tickets import Tickets
from trencadis.config.dump import dump_options
from trencadis.engine.request_validation import check_request
from trencadis.errors import InvalidRequestError, RequestError, TrencadisError
from trencadis.records import EmbeddingRequest, FinishedSequence, Request
from trencadis.records.plain import check_plain

__all__ = ["RemoteEngineClient"]


class RemoteEngineClient(EngineClient):
    """Knows which requests are live by what it sent and what came back; the host alone decides when one has ended.

    Slots are *tickets* of this side: one is given again once the end of its request has come.

    Args:
        link: To the host; closed with the client.
        ready: What the host said when its engine was ready.
    """

    is_stalled = False  # waiting for a message costs nothing

    def __init__(self, link: Link, ready: ReadyMessage) -> None:
        self.model = model_of(ready)
        self.max_model_len = ready.max_model_len
        self.plan_hash = ready.plan_hash
        self._link = link
        self._tickets = Tickets()
        self._ticket_of: dict[str, int] = {}
        self._ending: set[int] = set()
        self._embedding: set[str] = set()
        self._steps: deque[StepMessage] = deque()
        self._refused: list[tuple[str, RequestError]] = []
        self._callbacks: deque[Callable[[str], None]] = deque()
        self._last_prompt: tuple[tuple[int, ...], bytes] = ((), b"")
        self._askers: deque[Callable[[dict[str, Any] | TrencadisError], None]] = deque()

    @property
    def num_live(self) -> int:
        """Requests whose end has not come."""
        return self._tickets.num_taken

    # ------------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> int:
        """Send it; what the engine alone can refuse is refused later."""
        self._check_id(request.request_id)
        if self.model.generates:
            check_request(
                request,
                vocab_size=self.model.vocab_size,
                max_model_len=self.max_model_len,
                eos_token_ids=self.model.eos_token_ids,
            )
        ticket = self._tickets.take()
        self._ticket_of[request.request_id] = ticket
        try:
            self._link.send(add_message(request, ticket, self._bytes_of(request.prompt_token_ids)))
        except InvalidRequestError:  # it cannot be encoded: nothing was sent
            self._forget(request.request_id)
            raise
        return ticket

    def abort(self, request_id: str) -> FinishedSequence | None:
        """Say so; the end comes with a later step. A text that waits to be embedded is forgotten at once."""
        if request_id in self._embedding and not self._link.failure:
            self._embedding.discard(request_id)
            self._link.send(DropMessage(request_id=request_id))
        else:
            self._end(request_id, is_complete=False)
        return None

    def stop(self, request_id: str) -> FinishedSequence | None:
        """Say so; the end comes with a later step."""
        self._end(request_id, is_complete=True)
        return None

    def embed(self, request: EmbeddingRequest) -> None:
        """Send it; a refusal comes later."""
        self._check_id(request.request_id)
        tokens = request.token_ids
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.model.vocab_size:
            raise InvalidRequestError(
                f"request {request.request_id!r}: a token id is outside the vocabulary, 0 to {self.model.vocab_size - 1}.",
                hint="Use the model's own tokenizer.",
            )
        self._link.send(EmbedMessage(request_id=request.request_id, token_ids=int32_bytes(tokens)))
        self._embedding.add(request.request_id)

    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Ask; the answer comes between two steps of the engine."""
        self._link.check()
        self._callbacks.append(callback)
        self._link.send(AskMetricsMessage())

    def ask(
        self,
        question: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Ask; the answer comes between two steps of the engine."""
        self._link.check()
        try:
            plain = dump_options(arguments)
        except RecursionError:
            raise InvalidRequestError(f"{question}: an argument is nested too deeply.") from None
        for name, value in plain.items():
            check_plain(value, name)
        self._link.send(AskMessage(question=question, arguments=plain))
        self._askers.append(callback)

    # --------------------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """True while something is to come, or came and was not taken."""
        return bool(self._steps or self._refused or self._ticket_of or self._embedding)

    def step(self, *, timeout_s: float | None = None) -> StepNews:
        """Return the news of the oldest step that came; waits for one if none is here."""
        if not self._steps and not self._refused:
            self._take(self._link.receive(timeout_s))
        if self._refused:
            refused, self._refused = self._refused, []
            return StepNews(refused=tuple(refused))
        if not self._steps:
            return NO_NEWS
        news = news_of(self._steps.popleft())
        for finished in news.finished:
            self._forget(finished.request_id)
        for embedding in news.embeddings:
            self._embedding.discard(embedding.request_id)
        return news

    def take_in(self, *, is_likely: bool = False) -> bool:
        """Take in what has come, without waiting; True if :meth:`step` need not wait.

        Args:
            is_likely: The socket's file says that something has come.

        Raises:
            EngineEndedError: The engine failed, and says so.
        """
        self._take(self._link.take_in(is_likely=is_likely))
        return self.has_news

    @property
    def has_rest(self) -> bool:
        """True if more has come than was taken in: :meth:`take_in` goes on."""
        return self._link.has_rest

    @property
    def has_news(self) -> bool:
        """True if :meth:`step` need not wait."""
        return bool(self._steps or self._refused)

    def take_last(self) -> None:
        """Take in what a process said that has ended.

        Raises:
            EngineEndedError: There is no more of that.
        """
        self._take(self._link.take_last())

    @property
    def stalled(self) -> str:
        """Where the engine has made no progress for too long; empty while all is well. From any thread."""
        return self._link.stalled

    @property
    def socket_file(self) -> int:
        """Becomes readable when something may have come; after every use of the client, look with :meth:`take_in`."""
        return self._link.socket_file

    @property
    def end_file(self) -> int:
        """Becomes and stays readable when the engine's process has ended."""
        return self._link.end_file

    def rest(self, timeout_s: float | None = None) -> None:
        """Sleep in the socket."""
        self._take(self._link.receive(timeout_s))

    def interrupt(self) -> None:
        """Wake the sleeper."""
        self._link.interrupt()

    def close(self) -> None:
        """Ask the host to end, and make sure that it does."""
        self._link.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _check_id(self, request_id: str) -> None:
        self._link.check()
        if request_id in self._ticket_of or request_id in self._embedding:
            raise InvalidRequestError(f"request {request_id!r} is live already.", hint="Choose another request id.")

    def _bytes_of(self, prompt: tuple[int, ...]) -> bytes:
        """Return token ids as they are sent; the choices of one prompt follow each other, and share them."""
        if self._last_prompt[0] is not prompt:
            self._last_prompt = prompt, int32_bytes(prompt)
        return self._last_prompt[1]

    def _end(self, request_id: str, *, is_complete: bool) -> None:
        ticket = self._ticket_of.get(request_id)
        if ticket is None or ticket in self._ending or self._link.failure:
            return
        self._ending.add(ticket)
        self._link.send(EndMessage(ticket=ticket, is_complete=is_complete))

    def _take(self, messages: Iterable[HostMessage]) -> None:
        for message in messages:
            match message:
                case StepMessage():
                    self._steps.append(message)
                case RefusedMessage(request_id=request_id, fault=fault):
                    self._refuse(request_id, error_of(fault))
                case MetricsMessage(text=text):
                    self._callbacks.popleft()(text)
                case AnswerMessage(table=table, fault=fault):
                    self.plan_hash = table.get("plan_hash", self.plan_hash)
                    self._askers.popleft()(table if fault is None else error_of(fault))
                case FailedMessage(fault=fault):
                    self._link.fail(f"the engine failed: {fault.message}")

    def _refuse(self, request_id: str, error: Exception) -> None:
        if request_id in self._ticket_of:
            self._forget(request_id)
        elif request_id in self._embedding:
            self._embedding.discard(request_id)
        else:
            return  # a text that nobody waits for any more
        refusal = error if isinstance(error, RequestError) else InvalidRequestError(str(error))
        self._refused.append((request_id, refusal))

    def _forget(self, request_id: str) -> None:
        ticket = self._ticket_of.pop(request_id)
        self._ending.discard(ticket)
        self._tickets.give_back(ticket)
