"""State shared by all endpoints of an application: current engine, admission control, model names."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trencadis.clock import Clock
from trencadis.failure_costs import FailureCosts
from trencadis_server.config import ServerConfig
from trencadis_server.errors import EngineUnavailableError
from trencadis_server.fair_threads import FairThreads

if TYPE_CHECKING:
    from starlette.requests import Request

    from trencadis import AsyncLLM

__all__ = ["Admission", "EngineSource", "Hold", "ServerContext", "context_of"]

_STALLED_RETRY_S = 5.0
_NUM_THREADS = 2
_MAX_PARSED_INLINE = 16_384
"""Bytes that are parsed and validated within a millisecond; handing them to a thread costs a tenth of that."""


class Hold(Protocol):
    """A request's place in admission control, freed when its ``with`` block ends. Event loop only."""

    def first_token(self) -> None:
        """Mark the prompt as computed: its tokens do not count as waiting any more. A second call does nothing."""


@runtime_checkable
class Admission(Protocol):
    """Keeps the server within ``server.max_requests`` and ``server.max_waiting_tokens``. Event loop only."""

    def check(self, num_prompt_tokens: int, num_requests: int) -> None:
        """Refuse a request that would not even fit if the server had no other.

        Args:
            num_prompt_tokens: Prompt tokens of all its engine requests together, or as many as are known.
            num_requests: Engine requests it makes.

        Raises:
            InvalidRequestError: The request is larger than a limit.
        """

    def hold(self, num_prompt_tokens: int, num_requests: int = 1, *, caller: str = "") -> AbstractContextManager[Hold]:
        """Acquire a place for an HTTP request; leaving the block frees it.

        Args:
            num_prompt_tokens: Prompt tokens of all its engine requests together.
            num_requests: Engine requests it makes: one for each choice of each prompt, or for each text to embed.
            caller: Name of the API key.

        Raises:
            TooBusyError: A limit is reached; answered 429 with Retry-After.
        """


@runtime_checkable
class EngineSource(Protocol):
    """Owner of the engine, which may be loading, restarting or gone."""

    @property
    def llm(self) -> AsyncLLM:
        """The engine that serves now.

        Raises:
            EngineEndedError: No engine serves; the message says why.
        """


class ServerContext:
    """Type of ``request.app.state.context``.

    Args:
        engines: Source of the current engine.
        config: Table ``[server]``.
        model_names: Names that clients may ask for, the first is the one in answers; at least one.
        admission: Admission control.
        clock: Clock of the server.
        created: Start of the server, seconds since 1970.
        has_tenants: Whether there are API keys of several names; each then leaves a thread to the others.

    Attributes:
        config: Table ``[server]``.
        model_names: Names that clients may ask for; the first is the one in answers.
        admission: Admission control.
        clock: Clock of the server.
        created: Start of the server, seconds since 1970.
        encoder: Runs the tokenizer off the event loop.
        parser: Parses bodies off the event loop.
        writer: Writes long answers off the event loop.
    """

    def __init__(
        self,
        engines: EngineSource,
        *,
        config: ServerConfig,
        model_names: tuple[str, ...],
        admission: Admission,
        clock: Clock,
        created: int,
        has_tenants: bool = False,
    ) -> None:
        self._engines = engines
        self.config = config
        self.model_names = model_names
        self.admission = admission
        self.clock = clock
        self.created = created
        threads = functools.partial(
            FairThreads, _NUM_THREADS, most_of_one=_NUM_THREADS - 1 if has_tenants else _NUM_THREADS, clock=clock
        )
        costs = FailureCosts(clock)
        self.encoder = threads(costs=costs)
        self.parser = threads(costs=costs, max_inline=_MAX_PARSED_INLINE)
        self.writer = threads()

    @property
    def llm(self) -> AsyncLLM:
        """The engine that serves now.

        Raises:
            EngineEndedError: No engine serves; the message says why.
        """
        return self._engines.llm

    @property
    def ready_llm(self) -> AsyncLLM:
        """The engine, for a new request.

        Raises:
            EngineEndedError: No engine serves, or it makes no progress; the message says why.
        """
        llm = self.llm
        if llm.stalled:
            raise EngineUnavailableError(
                f"The engine is {llm.stalled}.", state="stalled", retry_after_s=_STALLED_RETRY_S
            )
        return llm

    @property
    def fingerprint(self) -> str:
        """Value of ``system_fingerprint``: a hash of plugins, versions and options.

        Raises:
            EngineEndedError: No engine serves.
        """
        return f"fp_{self.llm.plan_hash}"


def context_of(request: Request) -> ServerContext:
    """Return the context of the application that serves a request. Pure."""
    context: ServerContext = request.app.state.context
    return context
