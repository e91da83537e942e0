"""The engine of an encoder, which generates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trencadis.engine.stage import BareParts
from trencadis.errors import InvalidRequestError, RanksLostError
from trencadis.records import (
    Embedding,
    EmbeddingRequest,
    EngineLoad,
    EngineTotals,
    FinishedSequence,
    Request,
    TokenDeltas,
)
from trencadis_stages.embedding.queue import EmbeddingQueue

__all__ = ["EmbeddingEngine"]

_EMPTY = np.empty(0, np.int32)


class EmbeddingEngine:
    """An engine whose steps embed a micro-batch each. One thread calls it.

    Args:
        parts: Parts of the engine.

    Attributes:
        model: The loaded model.
        max_model_len: Longest text, tokens.
        plan_hash: Hash of the resolved plugins, versions and options.
        totals: Counters of steps; all stay 0.
    """

    is_stalled = False
    num_running = 0
    hashing = None

    def __init__(self, parts: BareParts) -> None:
        self.model = parts.model
        self.max_model_len = parts.max_model_len
        self.plan_hash = parts.plan_hash
        self.totals = EngineTotals()
        self._parts = parts
        self._queue = EmbeddingQueue(
            parts.executor,
            parts.model,
            max_model_len=parts.max_model_len,
            max_num_batched_tokens=parts.config.engine.max_num_batched_tokens,
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

    def take(self, request: EmbeddingRequest) -> None:
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

    def withdraw(self, request_id: str) -> FinishedSequence | None:
        """Do nothing: there is no sequence to move."""
        return None

    @property
    def has_work(self) -> bool:
        """True while texts wait."""
        return bool(self._queue)

    @property
    def num_waiting(self) -> int:
        """Texts that wait."""
        return len(self._queue)

    def load(self) -> EngineLoad:
        """Return how much there is to do."""
        return EngineLoad(num_waiting=self.num_waiting)

    def work_ahead(self) -> float | None:
        """There is nothing to do ahead."""
        return None

    def answer(self, question: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is switched off; there is no scheduling to ask about.

        Raises:
            InvalidRequestError: Another question.
        """
        if question == "switched_off":
            return self._parts.switched_off()
        raise InvalidRequestError(
            f"{self.model.architecture} is an encoder: there are no steps, and nothing is scheduled."
        )

    def metrics(self) -> str:
        """Return what the observers measured, in Prometheus' text format; between steps."""
        return self._parts.metrics()

    def step(self) -> TokenDeltas:
        """Embed one micro-batch."""
        embeddings: tuple[Embedding, ...] = ()
        try:
            embeddings = self._queue.run()
        except RanksLostError as error:
            self._parts.restart(error)
        return TokenDeltas(slots=_EMPTY, num_tokens=_EMPTY, token_ids=_EMPTY, embeddings=embeddings)

    def close(self) -> None:
        """Forget what waits, close observers and the executor; may be called twice."""
        if not self._closed:
            self._closed = True
            self._queue.clear()
            self._parts.close()
