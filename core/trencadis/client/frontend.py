"""Engine and tokenizer together: requests of clients in, their outputs out. Single-threaded, as the engine is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from trencadis.client.client_embedding import ClientEmbedding
from trencadis.client.client_request import ClientRequest
from trencadis.client.engine_client import EngineClient
from trencadis.client.output_processor import OutputProcessor
from trencadis.client.prompts import Prompt, as_token_ids
from trencadis.clock import Clock, SystemClock
from trencadis.errors import EngineEndedError, InvalidRequestError, RequestError, TrencadisError
from trencadis.records import DEFAULT_TERMS, Embedding, Request, RequestTerms, SamplingParams
from trencadis.records.plain import check_plain
from trencadis.text import Tokenizer, needs_tokenizer

__all__ = ["Frontend"]

_TRANSFER_POLL_S = 0.001
_CLOSING_S = 5.0


class Frontend:
    """What serves clients from one engine. All methods are called from the engine's thread.

    Args:
        engine: Ready for requests.
        tokenizer: Of its model.
        clock: Bounds how long closing waits for the engine; the system's if none.

    Attributes:
        engine: As given.
        tokenizer: As given.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, *, clock: Clock | None = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._clock = clock or SystemClock()
        self._processor = OutputProcessor(engine.stop)
        self._live: dict[str, ClientRequest] = {}
        self._embeddings: dict[str, ClientEmbedding] = {}
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """True while a step can change anything."""
        return self.engine.has_work

    @property
    def live(self) -> tuple[ClientRequest, ...]:
        """Clients whose requests have not ended, by arrival."""
        return tuple(self._live.values())

    def find(self, request_id: str) -> ClientRequest | None:
        """Return a live request by the client's id. Pure."""
        return self._live.get(request_id)

    # ------------------------------------------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        terms: RequestTerms = DEFAULT_TERMS,
        streams: bool = False,
    ) -> ClientRequest:
        """Queue a request; all its completions or none.

        Args:
            prompt: Text or token ids.
            params: ``n`` may be above 1.
            request_id: Unique among live requests.
            terms: Who asks, and how urgent it is.
            streams: :meth:`step` reports every change, not only the end.

        Raises:
            RequestError: The request is at fault or was refused; nothing of it is left in the engine.
            EngineEndedError: The engine was closed, died or hung.
        """
        try:
            self._check_open(request_id)
            if request_id in self._live:
                raise InvalidRequestError(f"request {request_id!r} is live already.", hint="Choose another request id.")
            tokens = self._encode(prompt)
            if params.stop and not self.tokenizer.has_text:
                raise needs_tokenizer("a stop string", field="stop")
        except RequestError:
            self._not_served(terms)
            raise
        request = Request.on_terms(terms, request_id=request_id, prompt_token_ids=tokens, params=params)
        text = prompt if isinstance(prompt, str) else None
        client = ClientRequest(request, prompt=text, tokenizer=self.tokenizer, streams=streams)
        self._live[request_id] = client
        try:
            for one, completion in zip(client.requests, client.completions, strict=True):
                self._processor.add(client, completion, slot=self.engine.add(one))
        except TrencadisError as error:
            for completion in client.completions:
                # Without a slot it never reached the engine, where its name may be another's.
                if completion.slot < 0:
                    client.fail(completion, str(error))
            self.abort(client)
            raise
        return client

    def embed(self, prompts: Sequence[Prompt], *, request_id: str, future: Future[list[Embedding]]) -> None:
        """Queue texts to embed.

        Args:
            prompts: Text or token ids, each.
            request_id: Unique among all.
            future: Gets one vector for each, in order, or an error, within :meth:`step`.

        Raises:
            RequestError: A text is at fault, or the model does not embed; ``future`` is left alone.
            EngineEndedError: The engine was closed, died or hung.
        """
        self._check_open(request_id)
        client = ClientEmbedding(request_id, [self._encode(prompt) for prompt in prompts], future)
        try:
            for request in client.requests:
                self.engine.embed(request)
                self._embeddings[request.request_id] = client
        except RequestError:
            self.drop_embeddings(request_id)
            raise
        client.finish_if_complete()

    def drop_embeddings(self, request_id: str) -> ClientEmbedding | None:
        """Forget what a client asked to embed; returns it, with its future left alone, or None if it was answered."""
        dropped = None
        for name in [name for name, client in self._embeddings.items() if client.request_id == request_id]:
            dropped = self._embeddings.pop(name)
            self.engine.abort(name)
        return dropped

    def abort(self, client: ClientRequest) -> None:
        """End a request; nothing happens if it has ended. What it has so far stays in its output.

        It is finished at once, or, with an engine elsewhere, after a later step.
        """
        for completion in client.completions:
            if completion.finish_reason is None and completion.slot >= 0:
                finished = self.engine.abort(completion.request_id)
                if finished is not None:
                    self._processor.finish(finished)
        if client.is_finished:
            self._forget(client)

    def step(self, *, timeout_s: float | None = None) -> list[ClientRequest]:
        """Take one step of the engine; returns the clients with news: streams that grew, and whoever is finished.

        Args:
            timeout_s: The longest wait for an engine elsewhere; None: until there is news.

        Raises:
            EngineEndedError: The engine died or hung.
        """
        if self.engine.is_stalled:
            self.engine.rest(_TRANSFER_POLL_S)
        news = self.engine.step(timeout_s=timeout_s)
        changed = self._processor.process(news)
        for embedding in news.embeddings:
            owner = self._embeddings.pop(embedding.request_id, None)
            if owner is not None:
                owner.add(embedding)
        for request_id, error in news.refused:
            changed += self._refuse(request_id, error)
        for client in changed:
            if client.is_finished:
                self._forget(client)
        return changed

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """Ask an operator's question, or for a change, and wait for the answer.

        Args:
            question: As of :meth:`trencadis.engine.inspect.administration.Administration.answer`.
            arguments: The same.

        Raises:
            TrencadisError: As of the same, or the engine has ended.
        """
        answers: list[dict[str, Any] | TrencadisError] = []
        self.engine.ask(question, arguments, answers.append)
        while not answers:
            self.engine.rest()
        answer = answers[0]
        if isinstance(answer, TrencadisError):
            raise answer
        return answer

    def close(self) -> None:
        """End every request and close the engine; may be called twice."""
        self._is_closed = True
        try:
            self._end_all()
        finally:
            self.engine.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _check_open(self, request_id: str) -> None:
        if self._is_closed:
            raise InvalidRequestError(f"request {request_id!r} came after the engine was closed.")

    def _not_served(self, terms: RequestTerms) -> None:
        """Let the KV connector know of a request that never reached the engine."""
        if terms.transfer_params is not None and not self._is_closed:
            arguments = {"transfer_params": dict(terms.transfer_params)}
            with contextlib.suppress(TrencadisError):
                self.engine.ask("reject_transfer", arguments, lambda _: None)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return as_token_ids(prompt)
        check_plain(prompt, "prompt")
        return self.tokenizer.encode(prompt)

    def _refuse(self, request_id: str, error: RequestError) -> list[ClientRequest]:
        """Give up a request that the engine did not take after all; its other completions end with it."""
        embedding = self._embeddings.pop(request_id, None)
        if embedding is not None:
            embedding.fail(error)
        client = self._processor.refuse(request_id, error)
        if client is None:
            return []
        self.abort(client)
        return [client] if client.is_finished else []

    def _end_all(self) -> None:
        for client in self.live:
            self.abort(client)
        deadline_s = self._clock.now_s() + _CLOSING_S
        with contextlib.suppress(EngineEndedError):
            while self._live and (left_s := deadline_s - self._clock.now_s()) > 0:
                self.step(timeout_s=left_s)

    def _forget(self, client: ClientRequest) -> None:
        if self._live.get(client.request_id) is client:
            del self._live[client.request_id]
