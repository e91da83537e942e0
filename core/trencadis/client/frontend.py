"""Frontend: tokenizes prompts, queues requests in an engine, and collects their outputs. Single-threaded, as the engine is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from trencadis.client.client_request import ClientRequest
from trencadis.client.engine_client import EngineClient
from trencadis.client.output_processor import OutputProcessor
from trencadis.client.prompts import Prompt, as_token_ids
from trencadis.clock import Clock, SystemClock
from trencadis.errors import BackendError, EngineEndedError, InvalidRequestError, RequestError, TrencadisError
from trencadis.faults import shown
from trencadis.records import (
    DEFAULT_TERMS,
    Embedding,
    EmbeddingRequest,
    ModelFacts,
    Request,
    RequestTerms,
    SamplingParams,
)
from trencadis.records.plain import check_plain, is_text
from trencadis.text import Tokenizer, ends_of_turn, needs_tokenizer

__all__ = ["ClientEmbedding", "Frontend"]

_TRANSFER_POLL_S = 0.001
_CLOSING_S = 5.0


class Frontend:
    """Serves clients from one engine. All methods are called from the thread that steps the engine.

    Args:
        engine: Ready for requests.
        tokenizer: Tokenizer of the model.
        clock: Bounds how long closing waits for the engine; the system's if none.

    Attributes:
        engine: The engine.
        tokenizer: The tokenizer.
        end_token_ids: Tokens that end a text: the model's, then those that only the tokenizer or the chat template names.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, *, clock: Clock | None = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._own_ends = _own_ends(engine.model, tokenizer)
        self.end_token_ids = engine.model.eos_token_ids + self._own_ends
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
            terms: Scheduling parameters.
            streams: :meth:`step` reports every change, not only the end.

        Raises:
            RequestError: The request is invalid or was refused; nothing of it is left in the engine.
            EngineEndedError: The engine was closed, died or hung.
        """
        try:
            self._check_open(request_id)
            if request_id in self._live:
                raise InvalidRequestError(f"request {request_id!r} is live already.", hint="Choose another request id.")
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError(
                    f"sampling_params = {shown(params)}: no SamplingParams.",
                    hint="Give SamplingParams(temperature=0.7, max_tokens=64), for instance.",
                )
            tokens = self._encode(prompt)
            if params.stop and not self.tokenizer.has_text:
                raise needs_tokenizer("a stop string", field="stop")
            request = Request.on_terms(
                terms, request_id=request_id, prompt_token_ids=tokens, params=params, end_token_ids=self._own_ends
            )
            text = prompt if isinstance(prompt, str) else None
            client = ClientRequest(request, prompt=text, tokenizer=self.tokenizer, streams=streams)
        except RequestError:
            self._reject_transfer(terms)
            raise
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
            RequestError: A text is invalid, or the model does not embed; ``future`` stays as it is.
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
        """Drop an embedding request; returns it, with its future as it is, or None if it was answered."""
        dropped = None
        for name in [name for name, client in self._embeddings.items() if client.request_id == request_id]:
            dropped = self._embeddings.pop(name)
            self.engine.abort(name)
        return dropped

    def abort(self, client: ClientRequest) -> None:
        """End a request; nothing happens if it has ended. What it has so far stays in its output.

        It is finished at once, or, with an engine in another process, after a later step.
        """
        for completion in client.completions:
            if completion.finish_reason is None and completion.slot >= 0:
                finished = self.engine.abort(completion.request_id)
                if finished is not None:
                    self._processor.finish(finished)
        if client.is_finished:
            self._forget(client)

    def step(self, *, timeout_s: float | None = None) -> list[ClientRequest]:
        """Take one step of the engine; returns the changed clients: streams that grew, and requests that finished.

        Args:
            timeout_s: The longest wait for an engine in another process; None: until there are outputs.

        Raises:
            EngineEndedError: The engine died or hung.
        """
        if self.engine.is_stalled:
            self.engine.rest(_TRANSFER_POLL_S)
        outputs = self.engine.step(timeout_s=timeout_s)
        changed = self._processor.process(outputs)
        for embedding in outputs.embeddings:
            owner = self._embeddings.pop(embedding.request_id, None)
            if owner is not None:
                owner.add(embedding)
        for request_id, error in outputs.refused:
            changed += self._refuse(request_id, error)
        for client in changed:
            if client.is_finished:
                self._forget(client)
        return changed

    def control(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Send a control request and wait for the answer.

        Args:
            name: Name of the control request, see :meth:`trencadis.engine.engine.Engine.answer`.
            arguments: Arguments of the control request.

        Raises:
            TrencadisError: The engine cannot answer it, or has ended.
        """
        answers: list[dict[str, Any] | TrencadisError] = []
        self.engine.control(name, arguments, answers.append)
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

    def _reject_transfer(self, terms: RequestTerms) -> None:
        """Tell the KV connector of a request with transfer parameters that never reached the engine."""
        if terms.transfer_params is not None and not self._is_closed:
            arguments = {"transfer_params": dict(terms.transfer_params)}
            with contextlib.suppress(TrencadisError):
                self.engine.control("reject_transfer", arguments, lambda _: None)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return as_token_ids(prompt)
        if not is_text(prompt):
            check_plain(prompt, "prompt")
        return self.tokenizer.encode(prompt)

    def _refuse(self, request_id: str, error: RequestError) -> list[ClientRequest]:
        """End a request that the engine refused after it was queued; its other completions end with it."""
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


def _own_ends(model: ModelFacts, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ends of a text that the model's files do not name; every request carries them to its engine."""
    if not (model.generates and tokenizer.has_text):
        return ()
    ends = ends_of_turn(tokenizer, {"model": model.eos_token_ids})
    return tuple(end for end in ends if end not in model.eos_token_ids and end < model.vocab_size)


class ClientEmbedding:
    """An embedding request: some texts, and one future for all their vectors, in order.

    Args:
        request_id: The client's; texts are named ``id/0``, ``id/1`` ...
        token_ids: Tokens of each text.
        future: Gets all vectors, or the first error.

    Attributes:
        request_id: The client's.
        requests: Engine requests, one for each text.
    """

    def __init__(self, request_id: str, token_ids: Sequence[tuple[int, ...]], future: Future[list[Embedding]]) -> None:
        self.request_id = request_id
        self.requests = tuple(
            EmbeddingRequest(request_id=f"{request_id}/{index}", token_ids=ids) for index, ids in enumerate(token_ids)
        )
        self._future = future
        self._vectors: dict[str, Embedding] = {}

    def add(self, embedding: Embedding) -> None:
        """Store one vector, or fail if its text failed."""
        if embedding.error:
            self.fail(BackendError(f"request {embedding.request_id!r} failed: {embedding.error}"))
            return
        self._vectors[embedding.request_id] = embedding
        self.finish_if_complete()

    def finish_if_complete(self) -> None:
        """Set the result once every vector is there; without texts that is at once."""
        if len(self._vectors) == len(self.requests) and not self._future.done():
            self._future.set_result([self._vectors[request.request_id] for request in self.requests])

    def fail(self, error: TrencadisError) -> None:
        """Set an error; later vectors are dropped."""
        if not self._future.done():
            self._future.set_exception(error)
