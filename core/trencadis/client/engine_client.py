"""Interface of the client library to an engine, and its implementation for an engine on the calling thread.

Placements bring the implementations for engines elsewhere.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from trencadis.errors import RequestError, TrencadisError
from trencadis.records import (
    Embedding,
    EmbeddingRequest,
    FinishedSequence,
    Int32Array,
    ModelFacts,
    Request,
    TokenDeltas,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from trencadis.engine.stage import AnyEngine

__all__ = ["NO_OUTPUTS", "EngineClient", "LocalEngineClient", "StepOutputs", "step_outputs"]


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Outputs of one engine step: ``TokenDeltas`` as lists, which are faster to read one by one than arrays, and refused requests.

    An engine in another process sends them as they are.

    Attributes:
        slots: Slot of each sequence with new tokens.
        num_tokens: New tokens of each, at least 1.
        token_ids: All new tokens, sequence after sequence.
        finished: Sequences that ended; their slots may be given to others from now on.
        logprobs: By index into ``slots``.
        prompt_logprobs: ``index`` is the slot here: a chunk may yield prompt logprobs and no token.
        embeddings: Texts that were embedded since the last step.
        refused: Ids of requests and texts that the engine refused after they were queued, and the errors.
    """

    slots: Sequence[int] = ()
    num_tokens: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    finished: tuple[FinishedSequence, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embeddings: tuple[Embedding, ...] = ()
    refused: tuple[tuple[str, RequestError], ...] = ()


NO_OUTPUTS = StepOutputs()


def step_outputs(deltas: TokenDeltas, slots: Int32Array | None = None) -> StepOutputs:
    """Return the token deltas of an engine in this process as step outputs. Pure.

    Args:
        deltas: The engine's.
        slots: Numbers of the sequences with new tokens, int32 ``[num]``; None: their slots.
    """
    finished: tuple[FinishedSequence, ...] = deltas.finished
    refused: tuple[tuple[str, RequestError], ...] = ()
    if finished:
        refused = tuple([(one.request_id, one.refusal) for one in finished if one.refusal is not None])
    if refused:
        finished = tuple([one for one in finished if one.refusal is None])
    return StepOutputs(
        slots=(deltas.slots if slots is None else slots).tolist(),
        num_tokens=deltas.num_tokens.tolist(),
        token_ids=deltas.token_ids.tolist(),
        finished=finished,
        refused=refused,
        logprobs=deltas.logprobs,
        prompt_logprobs=deltas.prompt_logprobs,
        embeddings=deltas.embeddings,
    )


class EngineClient(ABC):
    """Connection to one engine. All methods except :meth:`interrupt` are called from one thread.

    An engine in another process answers later: there :meth:`abort` and :meth:`stop` return None and the end of the sequence comes
    with a later step, as does the refusal of a request for a reason that only the engine can know.

    Attributes:
        model: The loaded model.
        max_model_len: Longest sequence, tokens.
        plan_hash: Hash of the resolved plugins, versions and options.
    """

    model: ModelFacts
    max_model_len: int
    plan_hash: str

    @abstractmethod
    def add(self, request: Request) -> int:
        """Queue a request; returns the slot under which :meth:`step` reports its tokens, a small number that is used again.

        Raises:
            RequestError: The request is invalid, or was refused.
            EngineEndedError: The engine was closed, died or hung.
        """

    @abstractmethod
    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request; returns its end if that is known at once. Does nothing if it has ended."""

    @abstractmethod
    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request because its text is complete; otherwise the same as :meth:`abort`."""

    @abstractmethod
    def embed(self, request: EmbeddingRequest) -> None:
        """Queue a text; its vector comes with a later step.

        Raises:
            RequestError: The text is invalid, or the model does not embed.
            EngineEndedError: See :meth:`add`.
        """

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True while a step can bring outputs."""

    @property
    @abstractmethod
    def is_stalled(self) -> bool:
        """True if there is work, but stepping at once would be busy waiting."""

    @abstractmethod
    def step(self, *, timeout_s: float | None = None) -> StepOutputs:
        """Return the outputs of the next step; empty if there are none, also after :meth:`interrupt`.

        Args:
            timeout_s: The longest wait for an engine in another process; None: until there are outputs.

        Raises:
            EngineEndedError: The engine died or hung.
            InternalError: An invariant does not hold.
        """

    @abstractmethod
    def rest(self, timeout_s: float | None = None) -> None:
        """Sleep until there are outputs, :meth:`interrupt` is called, or time is up. Uses no CPU meanwhile.

        Raises:
            EngineEndedError: The engine died.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End the present or the next :meth:`rest` at once, or :meth:`step` where it waits. From any thread; at most 10 µs."""

    @abstractmethod
    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Request the metrics of the observers.

        Args:
            callback: Called with Prometheus' text format: at once, or within a later :meth:`step` or :meth:`rest`.

        Raises:
            EngineEndedError: See :meth:`add`.
        """

    @abstractmethod
    def control(
        self,
        name: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Send a control request: read or change the state of the engine; ``plan_hash`` follows the answer.

        Args:
            name: Name of the control request, see :meth:`trencadis.engine.engine.Engine.answer`.
            arguments: Arguments of the control request.
            callback: Called with the answer or an error: at once, or within a later :meth:`step` or :meth:`rest`.

        Raises:
            EngineEndedError: See :meth:`add`.
            InvalidRequestError: An argument that cannot be sent to the engine.
        """

    @abstractmethod
    def close(self) -> None:
        """End every request and the engine; may be called twice."""


class LocalEngineClient(EngineClient):
    """An engine in this process, stepped by the calling thread; every answer is immediate.

    Args:
        engine: Ready for requests; closed with the client.

    Attributes:
        engine: The engine.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self.engine = engine
        self.model = engine.model
        self.max_model_len = engine.max_model_len
        self.plan_hash = engine.plan_hash
        self._wake_up = threading.Event()
        engine.wake_by(self.interrupt)

    def add(self, request: Request) -> int:
        """Queue a request."""
        return self.engine.add(request)

    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request at once."""
        return self.engine.abort(request_id)

    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request at once."""
        return self.engine.stop(request_id)

    def embed(self, request: EmbeddingRequest) -> None:
        """Queue a text."""
        self.engine.take(request)

    @property
    def has_work(self) -> bool:
        """True while the engine has work."""
        return self.engine.has_work

    @property
    def is_stalled(self) -> bool:
        """True while the engine waits for transfers."""
        return self.engine.is_stalled

    def step(self, *, timeout_s: float | None = None) -> StepOutputs:
        """Run a step; ``timeout_s`` has no effect."""
        return step_outputs(self.engine.step())

    def rest(self, timeout_s: float | None = None) -> None:
        """Let the engine prepare work ahead, then sleep: it makes no outputs unless it is stepped."""
        pause_s = self.engine.work_ahead()
        if pause_s is not None:
            timeout_s = pause_s if timeout_s is None else min(timeout_s, pause_s)
        self._wake_up.wait(timeout_s)
        self._wake_up.clear()

    def interrupt(self) -> None:
        """End :meth:`rest`."""
        self._wake_up.set()

    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Call back at once."""
        callback(self.engine.metrics())

    def control(
        self,
        name: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Call back at once."""
        try:
            answer: dict[str, Any] | TrencadisError = self.engine.answer(name, arguments)
        except TrencadisError as error:
            answer = error
        self.plan_hash = self.engine.plan_hash
        callback(answer)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
