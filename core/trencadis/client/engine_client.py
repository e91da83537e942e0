"""What the user's side needs of an engine, wherever it runs: in this process, or in one of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.client.news import StepNews
from trencadis.errors import TrencadisError
from trencadis.records import EmbeddingRequest, FinishedSequence, ModelFacts, Request

__all__ = ["EngineClient"]


class EngineClient(ABC):
    """One engine as a client sees it. All methods but :meth:`interrupt` are called from one thread.

    An engine elsewhere answers later: :meth:`abort` and :meth:`stop` return None there and the end of the sequence comes with a
    later step; what only the engine can refuse is then refused.

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
            RequestError: The request is at fault, or was refused.
            EngineEndedError: The engine was closed, died or hung.
        """

    @abstractmethod
    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request; returns its end if that is known at once. Nothing happens if it has ended."""

    @abstractmethod
    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request because its text is complete; otherwise as :meth:`abort`."""

    @abstractmethod
    def embed(self, request: EmbeddingRequest) -> None:
        """Queue a text; its vector comes with a later step.

        Raises:
            RequestError: The text is at fault, or the model does not embed.
            EngineEndedError: As of :meth:`add`.
        """

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True while a step can bring news."""

    @property
    @abstractmethod
    def is_stalled(self) -> bool:
        """True if there is work, but stepping at once would be busy waiting."""

    @abstractmethod
    def step(self, *, timeout_s: float | None = None) -> StepNews:
        """Return what the next step brought; empty if nothing did, also after :meth:`interrupt`.

        Args:
            timeout_s: The longest wait for an engine elsewhere; None: until there is news.

        Raises:
            EngineEndedError: The engine died or hung.
            InternalError: An invariant does not hold.
        """

    @abstractmethod
    def rest(self, timeout_s: float | None = None) -> None:
        """Sleep until there is news, :meth:`interrupt` is called, or time is up. Costs no CPU meanwhile.

        Raises:
            EngineEndedError: The engine died.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End the present or the next :meth:`rest` at once, or :meth:`step` where it waits. From any thread; at most 10 µs."""

    @abstractmethod
    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Ask for what the observers measured.

        Args:
            callback: Called with Prometheus' text format: at once, or within a later :meth:`step` or :meth:`rest`.

        Raises:
            EngineEndedError: As of :meth:`add`.
        """

    @abstractmethod
    def ask(
        self,
        question: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Ask an operator's question, or for a change; ``plan_hash`` follows the answer.

        Args:
            question: As of :meth:`trencadis.engine.inspect.administration.Administration.answer`.
            arguments: The same.
            callback: Called with the answer, or with why there is none: at once, or within a later :meth:`step` or :meth:`rest`.

        Raises:
            EngineEndedError: As of :meth:`add`.
            InvalidRequestError: An argument that cannot travel to the engine.
        """

    @abstractmethod
    def close(self) -> None:
        """End every request and the engine; may be called twice."""
