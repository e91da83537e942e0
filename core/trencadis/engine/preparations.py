"""Requests whose sampler has work to do before they can run, such as compiling a grammar: they wait for it, and no other request does.

add ─▶ begin: the futures of the sampler ─▶ COMPILING ── done ─▶ WAITING
                                                └──── failed ─▶ finished, with the refusal
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from trencadis.engine.sequences import Sequence, SequenceState
from trencadis.engine.state import EngineState
from trencadis.errors import RequestError, RequestRefusedError
from trencadis.faults import FaultLog, as_words
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams

__all__ = ["Preparations"]

_FAULTS = FaultLog(logging.getLogger("trencadis.engine"))


class Preparations:
    """Begins what a sampler prepares, and lets sequences wait as others do when it is done. On the engine's thread.

    Args:
        state: The engine's state.
        begin: Asks the sampler, with parameters and tenant; see :class:`trencadis.interfaces.SupportsPreparation`.
        waits: Wait within :meth:`begin`, so that a run under a simulated clock is the same each time.

    Attributes:
        done: Sequences of which something is done; any thread appends. While it is empty :meth:`collect` need not be called.
        wake: Called after that.
    """

    def __init__(
        self,
        state: EngineState,
        begin: Callable[[SamplingParams, str], tuple[Future[Any], ...]],
        *,
        waits: bool = False,
    ) -> None:
        self._state = state
        self._begin = begin
        self._waits = waits
        self.done: deque[Sequence] = deque()
        self.wake: Callable[[], None] = lambda: None

    def begin(self, request: Request) -> tuple[Future[Any], ...]:
        """Return what a request has to wait for; empty: nothing.

        Raises:
            RequestError: It cannot be served, which was known at once.
        """
        tenants = self._state.tenants
        try:
            futures = self._begin(request.params, tenants.key(request.tenant))
        except RequestError:
            raise
        except Exception as error:
            raise _unprepared(error) from error
        if self._waits:
            wait(futures)
        refusal = _refusal(futures) if futures else None
        if refusal is not None:
            self._charge(request, refusal)
            raise refusal
        retry_after_s = tenants.preparations.retry_after_s(request.tenant)
        if retry_after_s and not all(future.done() for future in futures):
            for future in futures:
                future.cancel()
            raise RequestRefusedError(
                f"request {request.request_id!r} was refused: what tenant {tenants.key(request.tenant)!r} wanted to have prepared, such "
                "as grammars, failed too often and took long.",
                hint=f"Send it again after {retry_after_s:.0f} s; what is prepared already is served.",
                retry_after_s=retry_after_s,
            )
        return futures

    def _charge(self, request: Request, refusal: RequestError) -> None:
        """Count against the tenant what a refusal cost, once for all requests that waited for the same."""
        self._state.tenants.preparations.charge(request.tenant, refusal.cost_s)
        refusal.cost_s = 0.0

    def watch(self, sequence: Sequence) -> None:
        """Hear of it when what a sequence waits for is done."""

        def done(_: Future[Any]) -> None:
            self.done.append(sequence)
            self.wake()

        for future in sequence.preparation:
            future.add_done_callback(done)

    def collect(self) -> list[FinishedSequence]:
        """Let sequences wait for a step that can run now; returns those that are refused. Before each step."""
        ended: list[FinishedSequence] = []
        while self.done:
            sequence = self.done.popleft()
            is_live = self._state.table.sequences[sequence.slot] is sequence
            if not is_live or sequence.state is not SequenceState.COMPILING:
                continue  # it ended, or another future of its was done before
            refusal = _refusal(sequence.preparation)
            if refusal is not None:
                self._charge(sequence.request, refusal)
                ended.append(self._state.finish(sequence, FinishReason.ERROR, error=str(refusal), refusal=refusal))
            elif all(future.done() for future in sequence.preparation):
                self._state.prepared(sequence)
        return ended


def _refusal(futures: tuple[Future[Any], ...]) -> RequestError | None:
    """Return the first error among those that are done."""
    for future in futures:
        error = future.exception() if future.done() and not future.cancelled() else None
        if error is not None:
            return error if isinstance(error, RequestError) else _unprepared(error)
    return None


def _unprepared(error: BaseException) -> RequestError:
    _FAULTS.say("preparation", f"The sampler could not prepare a request: {as_words(error)}", error=error)
    return RequestRefusedError(f"the request could not be prepared: {as_words(error)}")
