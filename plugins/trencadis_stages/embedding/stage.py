"""The stage that embeds texts beside the steps of requests that generate, a micro-batch each."""

from __future__ import annotations

import attrs

from trencadis.engine.stage import EngineParts, Stage
from trencadis.engine.step import Obstacle, SubmittedStep
from trencadis.errors import InvalidRequestError, RanksLostError
from trencadis.records import Embedding, EmbeddingRequest, Request, StepOutput, TokenDeltas
from trencadis_stages.embedding.queue import EmbeddingQueue

__all__ = ["EmbeddingStage"]


class EmbeddingStage(Stage):
    """Takes part in steps while there are texts."""

    def __init__(self) -> None:
        self.takes = {EmbeddingRequest: self._add}
        self._embedded: tuple[Embedding, ...] = ()

    def bind(self, engine: EngineParts) -> None:
        """Take the parts, and rest until a text comes."""
        self._state, self._tell, self._take_part = engine.state, engine.tell, engine.take_part
        self._queue = EmbeddingQueue(
            engine.executor,
            engine.model,
            max_model_len=engine.limits.max_model_len,
            max_num_batched_tokens=engine.config.engine.max_num_batched_tokens,
        )
        self._take_part(self, False)

    def _add(self, request: EmbeddingRequest) -> None:
        """Queue a text.

        Raises:
            InvalidRequestError: The model cannot embed, an empty text, a token id outside the vocabulary, or an id that is live.
            PromptTooLongError: The model takes no text that long.
        """
        self._check_id(request.request_id, is_live=request.request_id in self._state.slot_of)
        self._queue.add(request)
        self._take_part(self, True)

    def accept(self, request: Request) -> Request:
        """Refuse a request with the id of a text."""
        self._check_id(request.request_id, is_live=request.request_id in self._queue)
        return request

    def _check_id(self, request_id: str, *, is_live: bool) -> None:
        if is_live:
            raise InvalidRequestError(f"request {request_id!r} is live already.", hint="Choose another request id.")

    def drop(self, request_id: str) -> bool:
        """Forget a text."""
        return self._queue.drop(request_id)

    def before_step(self) -> None:
        """Embed a micro-batch."""
        try:
            self._embedded = self._queue.run(is_alone=not self._state.slot_of)
        except RanksLostError:
            self._tell(Obstacle("ranks were lost while a text was embedded"))
            raise

    def after_step(self, step: SubmittedStep | None, output: StepOutput | None, deltas: TokenDeltas) -> TokenDeltas:
        """Add the vectors, and rest if no text is left."""
        if self._embedded:
            deltas, self._embedded = attrs.evolve(deltas, embeddings=self._embedded), ()
        if not self._queue:
            self._take_part(self, False)
        return deltas

    @property
    def wants_step(self) -> bool:  # type: ignore[override]
        """Whether texts wait."""
        return bool(self._queue)

    def close(self) -> None:
        """Forget what waits."""
        self._queue.clear()
