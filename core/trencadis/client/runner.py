"""Runner: what ``AsyncLLM`` hands its commands to, wherever the engine runs."""

from __future__ import annotations

from typing import Protocol

from trencadis.client.dispatcher import ControlRequest, Embed, MetricsRequest, RequestDispatcher, Submission
from trencadis.client.frontend import Frontend
from trencadis.client.output_stream import OutputStream

__all__ = ["Runner"]


class Runner(Protocol):
    """Serves coroutines from a frontend. Methods may be called from any thread."""

    @property
    def frontend(self) -> Frontend:
        """The frontend; from other threads only its constants may be read."""
        ...

    @property
    def dispatcher(self) -> RequestDispatcher:
        """The request dispatcher."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or has failed."""
        ...

    @property
    def failure(self) -> str:
        """Why the engine ended; empty while it is alive."""
        ...

    @property
    def stalled(self) -> str:
        """Where the engine has made no progress for too long; empty while all is well, or where nobody watches it."""
        ...

    def send(self, command: Submission | Embed | MetricsRequest | ControlRequest) -> None:
        """Execute a command; the answer, or a refusal, reaches its stream or future.

        Raises:
            EngineEndedError: The engine was closed or has failed; the cause is attached.
        """
        ...

    def abort(self, request_id: str, *, only: OutputStream | None = None) -> None:
        """End a request; its stream gets what there is. Texts to embed are forgotten. Nothing happens if it has ended.

        Args:
            request_id: The client's.
            only: Leave the request alone if its outputs go elsewhere: the id may have been used again.
        """
        ...

    def close(self) -> None:
        """End every request and the engine, and wait for that; may be called twice."""
        ...
