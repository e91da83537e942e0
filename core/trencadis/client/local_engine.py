"""An engine in this process, on the thread of whoever calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trencadis.client.engine_client import EngineClient
from trencadis.client.news import StepNews, news_of
from trencadis.errors import TrencadisError
from trencadis.records import EmbeddingRequest, FinishedSequence, Request

if TYPE_CHECKING:
    from trencadis.engine.embedding import EmbeddingEngine
    from trencadis.engine.engine import Engine

__all__ = ["LocalEngineClient"]


class LocalEngineClient(EngineClient):
    """Passes everything on; answers are immediate.

    Args:
        engine: Ready for requests; closed with the client.

    Attributes:
        engine: As given.
    """

    def __init__(self, engine: Engine | EmbeddingEngine) -> None:
        self.engine = engine
        self.model = engine.model
        self.max_model_len = engine.max_model_len
        self.plan_hash = engine.plan_hash
        self._news = threading.Event()
        engine.wake_by(self.interrupt)

    def add(self, request: Request) -> int:
        """Queue it."""
        return self.engine.add(request)

    def abort(self, request_id: str) -> FinishedSequence | None:
        """End it at once."""
        return self.engine.abort(request_id)

    def stop(self, request_id: str) -> FinishedSequence | None:
        """End it at once."""
        return self.engine.stop(request_id)

    def embed(self, request: EmbeddingRequest) -> None:
        """Queue it."""
        self.engine.embed(request)

    @property
    def has_work(self) -> bool:
        """The engine's."""
        return self.engine.has_work

    @property
    def is_stalled(self) -> bool:
        """The engine's."""
        return self.engine.is_stalled

    def step(self, *, timeout_s: float | None = None) -> StepNews:
        """Run a step; the time it takes is its own."""
        return news_of(self.engine.step())

    def rest(self, timeout_s: float | None = None) -> None:
        """Let the engine work ahead a little, then sleep: nothing comes from it while nobody steps it."""
        pause_s = self.engine.work_ahead()
        if pause_s is not None:
            timeout_s = pause_s if timeout_s is None else min(timeout_s, pause_s)
        self._news.wait(timeout_s)
        self._news.clear()

    def interrupt(self) -> None:
        """Wake the sleeper."""
        self._news.set()

    def request_metrics(self, callback: Callable[[str], None]) -> None:
        """Call back at once."""
        callback(self.engine.metrics())

    def ask(
        self,
        question: str,
        arguments: Mapping[str, Any],
        callback: Callable[[dict[str, Any] | TrencadisError], None],
    ) -> None:
        """Call back at once."""
        try:
            answer: dict[str, Any] | TrencadisError = self.engine.answer(question, arguments)
        except TrencadisError as error:
            answer = error
        self.plan_hash = self.engine.plan_hash
        callback(answer)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
