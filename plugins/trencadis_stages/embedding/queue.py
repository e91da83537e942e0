"""Texts that wait to be embedded, and the micro-batches that embed them.

    add ─▶ waiting ─▶ micro-batch ─▶ executor.embed ─▶ vectors
                          │ fails
                          ▼
                      suspects ─▶ each alone, once ─▶ a vector, or the error

Texts need no KV cache, no row and no plan: they run beside the steps of generating requests, one micro-batch a step.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import Final

import numpy as np

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.errors import ContractError, InvalidRequestError, PromptTooLongError, RanksLostError
from trencadis.faults import FaultLog, as_words
from trencadis.interfaces import Executor, SupportsEmbedding
from trencadis.records import Embedding, EmbeddingRequest, Float32Array, ModelFacts

__all__ = ["EmbeddingQueue"]

logger = logging.getLogger("trencadis.engine")

_SHARE: Final = 4
"""While sequences generate a micro-batch has at most one part in so many of the token budget: all their next tokens wait for it."""
_SUSPECT_LOSSES, _MOST_LOSSES = 2, 3
"""Lost micro-batches after which a text runs alone, and after which one that was lost alone has failed."""

_NO_VECTOR = np.empty(0, np.float32)


class EmbeddingQueue:
    """First come, first served; no text waits for another's failure.

    Args:
        executor: Embeds.
        model: The loaded model.
        max_model_len: Longest text, tokens.
        max_num_batched_tokens: Token budget of a step.

    Attributes:
        waiting: Texts by request id, first come first.
        suspects: Texts of micro-batches that failed; each runs alone once.
        done: Failures that the next run returns.
    """

    def __init__(
        self, executor: Executor, model: ModelFacts, *, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        self._embedder = executor if isinstance(executor, SupportsEmbedding) else None
        self._model = model
        self._max_model_len = max_model_len
        self._token_budget = max_num_batched_tokens
        self.waiting: OrderedDict[str, EmbeddingRequest] = OrderedDict()
        self.suspects: OrderedDict[str, EmbeddingRequest] = OrderedDict()
        self.done: tuple[Embedding, ...] = ()
        self._faults = FaultLog(logger)
        self._num_losses: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.suspects) + len(self.done)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.suspects

    def add(self, request: EmbeddingRequest) -> None:
        """Queue a text.

        Raises:
            InvalidRequestError: The model cannot embed, the text is empty, a token id is outside the vocabulary, or the id
                is live.
            PromptTooLongError: The model takes no text that long; nothing is cut off silently.
        """
        self._check(request)
        self.waiting[request.request_id] = request

    def drop(self, request_id: str) -> bool:
        """Forget a text; False if it is not here."""
        found = self.waiting.pop(request_id, None) or self.suspects.pop(request_id, None)
        return found is not None

    def clear(self) -> None:
        """Forget all texts."""
        self.waiting.clear()
        self.suspects.clear()

    def run(self, *, is_alone: bool = True) -> tuple[Embedding, ...]:
        """Embed one micro-batch; returns what is done, failures included.

        It takes the token budget, and a quarter of it beside generating requests: these have the budget in each step, and wait
        for the micro-batch in between, so that neither kind of work can starve the other. A text that is longer runs alone.

        Args:
            is_alone: No request generates or waits to.

        Raises:
            RanksLostError: The executor has to be started again; the texts wait again, or are done with the next call.
        """
        if self.done:
            done, self.done = self.done, ()
            return done
        batch = self._next(self._token_budget if is_alone else self._token_budget // _SHARE)
        if not batch or self._embedder is None:
            return ()
        ACTIVITY.begin(EnginePhase.FORWARD)
        try:
            vectors = self._embedder.embed([np.array(one.token_ids, np.int32) for one in batch])
            self._check_shape(vectors, len(batch))
        except RanksLostError as error:
            self._lost(batch, error)
            raise
        except Exception as error:
            return self._failed(batch, error)
        if self._num_losses:
            for request in batch:
                self._num_losses.pop(request.request_id, None)
        return tuple(
            _embedding(request, vector=vector)
            if np.isfinite(vector).all()
            else _embedding(request, error=f"{self._model.architecture} gave a vector that is not finite.")
            for request, vector in zip(batch, vectors, strict=True)
        )

    # ------------------------------------------------------------------------------------------------- innards

    def _check(self, request: EmbeddingRequest) -> None:
        tokens, name = request.token_ids, f"request {request.request_id!r}"
        if not self._model.embedding_size or self._embedder is None:
            raise InvalidRequestError(
                f"{self._model.architecture} cannot embed texts here.", hint="Name a model that can in model.path."
            )
        if request.request_id in self:
            raise InvalidRequestError(f"{name} is live already.", hint="Choose another request id.")
        if not tokens:
            raise InvalidRequestError(f"{name} has an empty text.", hint="Give at least one token.")
        if len(tokens) > self._max_model_len:
            raise PromptTooLongError(
                f"{name}: the text has {len(tokens)} tokens; the limit is {self._max_model_len}.",
                hint="Split the text, or raise model.max_model_len if the model allows it.",
            )
        vocab_size = self._model.vocab_size
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= vocab_size:
            raise InvalidRequestError(
                f"{name}: token id {low if low < 0 else high} is outside the vocabulary, 0 to {vocab_size - 1}.",
                hint="Use the model's own tokenizer.",
            )

    def _next(self, token_budget: int) -> list[EmbeddingRequest]:
        if self.suspects:
            return [self.suspects.popitem(last=False)[1]]
        batch: list[EmbeddingRequest] = []
        while self.waiting:
            token_budget -= len(next(iter(self.waiting.values())).token_ids)
            if batch and token_budget < 0:
                break
            batch.append(self.waiting.popitem(last=False)[1])
        return batch

    def _check_shape(self, vectors: Float32Array, num_texts: int) -> None:
        expected = (num_texts, self._model.embedding_size)
        if vectors.shape != expected or vectors.dtype != np.float32:
            raise ContractError(f"embed() returned {vectors.dtype} {vectors.shape}, not float32 {expected}")

    def _lost(self, batch: list[EmbeddingRequest], error: RanksLostError) -> None:
        """Let texts wait again; from the second loss on each runs alone, and one that is lost alone for the third time has failed."""
        self._num_losses.update(request.request_id for request in batch)
        if len(batch) == 1 and self._num_losses[batch[0].request_id] >= _MOST_LOSSES:
            self.done = self._failed(batch, error)
            return
        again = {request.request_id: request for request in batch}
        if max(self._num_losses[name] for name in again) >= _SUSPECT_LOSSES:
            self.suspects.update(again)
        else:
            self.waiting = OrderedDict({**again, **self.waiting})

    def _failed(self, batch: list[EmbeddingRequest], error: Exception) -> tuple[Embedding, ...]:
        """Fail a text that was alone; of several, each runs alone once."""
        said = f"A micro-batch of {len(batch)} texts failed: {as_words(error)}"
        self._faults.say("micro-batch", said, error=error, level=logging.ERROR)
        if len(batch) > 1:
            self.suspects.update((request.request_id, request) for request in batch)
            return ()
        return (_embedding(batch[0], error=as_words(error)),)


def _embedding(request: EmbeddingRequest, *, vector: Float32Array = _NO_VECTOR, error: str = "") -> Embedding:
    return Embedding(request_id=request.request_id, vector=vector, num_tokens=len(request.token_ids), error=error)
