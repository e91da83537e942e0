"""The engine of an encoder, which can only embed: no scheduler, no KV cache, no rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trencadis.engine.embedding import EmbeddingQueue
from trencadis.engine.inspect.accounting import EngineTotals
from trencadis.engine.inspect.observers import Observers
from trencadis.errors import InvalidRequestError
from trencadis.interfaces import Executor
from trencadis.records import EmbeddingRequest, FinishedSequence, ModelFacts, Request, TokenDeltas

__all__ = ["EmbeddingEngine"]

_EMPTY = np.empty(0, np.int32)


class EmbeddingEngine:
    """What :class:`~trencadis.engine.engine.Engine` offers, for a model that generates nothing. One thread calls it.

    Made by :func:`trencadis.engine.build.build_engine`.

    Args:
        executor: Started: the model is loaded.
        observers: Who watches; an encoder has no steps to show them, but they may have metrics of their own.
        model: The loaded model.
        max_model_len: Longest text, tokens.
        max_num_batched_tokens: Tokens of a micro-batch.
        plan_hash: Hash of the resolved plugins, versions and options.
        on_close: Called once when the engine closes, before the executor does.

    Attributes:
        model: As given.
        max_model_len: As given.
        plan_hash: As given.
        totals: Counters of steps; all stay 0.
    """

    is_stalled = False
    num_running = 0

    def __init__(
        self,
        *,
        executor: Executor,
        observers: Observers,
        model: ModelFacts,
        max_model_len: int,
        max_num_batched_tokens: int,
        plan_hash: str,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.plan_hash = plan_hash
        self.totals = EngineTotals()
        self._executor = executor
        self._observers = observers
        self._on_close = on_close
        self._queue = EmbeddingQueue(
            executor, model, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
        )
        self._closed = False

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Nothing but a text wakes it."""

    def add(self, request: Request) -> int:
        """Refuse a request for tokens.

        Raises:
            InvalidRequestError: Always.
        """
        raise InvalidRequestError(
            f"request {request.request_id!r}: {self.model.architecture} is an encoder: this model only embeds.",
            hint="Ask for embeddings, or name a model that generates in model.path.",
        )

    def embed(self, request: EmbeddingRequest) -> None:
        """Queue a text; its vector comes in ``TokenDeltas.embeddings`` of a later step.

        Raises:
            InvalidRequestError: An empty text, a token id outside the vocabulary, or an id that is live.
            PromptTooLongError: The model takes no text that long.
        """
        self._queue.add(request)

    def abort(self, request_id: str) -> FinishedSequence | None:
        """Forget a text that waits; None, as no sequence ends with it."""
        self._queue.drop(request_id)
        return None

    def stop(self, request_id: str) -> FinishedSequence | None:
        """Do nothing: there is no sequence to end."""
        return None

    @property
    def has_work(self) -> bool:
        """True while texts wait."""
        return bool(self._queue)

    @property
    def num_waiting(self) -> int:
        """Texts that wait."""
        return len(self._queue)

    def work_ahead(self) -> None:
        """There is nothing to do ahead."""

    def answer(self, question: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse: there is no scheduling to ask about.

        Raises:
            InvalidRequestError: Always.
        """
        raise InvalidRequestError(
            f"{self.model.architecture} is an encoder: there are no steps, and nothing is scheduled."
        )

    def metrics(self) -> str:
        """Return what the observers measured, in Prometheus' text format; between steps."""
        return self._observers.metrics()

    def step(self) -> TokenDeltas:
        """Embed one micro-batch."""
        return TokenDeltas(slots=_EMPTY, num_tokens=_EMPTY, token_ids=_EMPTY, embeddings=self._queue.run())

    def close(self) -> None:
        """Forget what waits, close observers and the executor; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self._observers.close()
        try:
            self._on_close()
        finally:
            self._executor.close()
