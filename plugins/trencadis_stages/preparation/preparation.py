"""Requests whose sampler has work to do before they can run, such as compiling a grammar: they wait for it, and no other request does.

add ─▶ begin: the futures of the sampler ─▶ ASIDE ── done ─▶ WAITING
                                                └──── failed ─▶ finished, with the refusal
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, wait
from typing import Any

from trencadis.clock import SimulatedClock
from trencadis.engine.sequences import Claim, Leaving, Sequence, SequenceState
from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.engine.step import Obstacle
from trencadis.errors import RequestError, RequestRefusedError
from trencadis.failure_costs import FailureCosts, tenant_key
from trencadis.faults import FaultLog, as_words
from trencadis.records import FinishReason, Request

__all__ = ["COMPILING", "Preparation"]

COMPILING = "compiling"
"""Why a sequence stands aside that waits for its sampler."""

_FAULTS = FaultLog(logging.getLogger("trencadis.engine"))


class Preparation(Stage):
    """Begins what a sampler prepares, and lets sequences wait as others do when it is done.

    Args:
        makings: The sampler's part is used.
    """

    accepts_last = True

    def __init__(self, makings: Makings) -> None:
        self._begin = makings.sampling.prepare
        self._begun: dict[str, tuple[Future[Any], ...]] = {}  # by id of a request that is not added yet
        self._futures: dict[
            int, tuple[Future[Any], ...]
        ] = {}  # by slot; kept, with their results, until the sequence ends
        self._done: deque[Sequence] = deque()

    def bind(self, engine: EngineParts) -> None:
        """Take the parts; under a simulated clock what is begun is waited for, so that a run is the same each time."""
        self._state, self._wake, self._ended = engine.state, engine.wake, engine.ended
        self._costs = FailureCosts(engine.state.clock)
        self._tell, self._take_part = engine.tell, engine.take_part
        self._waits = isinstance(engine.state.clock.source, SimulatedClock)
        self._take_part(self, False)

    def accept(self, request: Request) -> Request:
        """Begin what a request has to wait for.

        Raises:
            RequestError: It cannot be served, which was known at once.
        """
        key = tenant_key(request.tenant)
        try:
            futures = self._begin(request.params, key)
        except RequestError:
            raise
        except Exception as error:
            raise _unprepared(error) from error
        if not futures:
            return request
        if self._waits:
            wait(futures)
        refusal = _refusal(futures)
        if refusal is not None:
            self._charge(request, refusal)
            raise refusal
        retry_after_s = self._costs.retry_after_s(key)
        if retry_after_s and not all(future.done() for future in futures):
            for future in futures:
                future.cancel()
            raise RequestRefusedError(
                f"request {request.request_id!r} was refused: what tenant {key!r} wanted to have prepared, such "
                "as grammars, failed too often and took long.",
                hint=f"Send it again after {retry_after_s:.0f} s; what is prepared already is served.",
                retry_after_s=retry_after_s,
            )
        self._begun[request.request_id] = futures
        return request

    def _charge(self, request: Request, refusal: RequestError) -> None:
        """Count against the tenant what a refusal cost, once for all requests that waited for the same."""
        self._costs.charge(request.tenant, refusal.cost_s)
        refusal.cost_s = 0.0

    def added(self, sequence: Sequence) -> str:
        """Let a sequence stand aside until all is done."""
        futures = self._begun.pop(sequence.request.request_id, ())
        if not futures:
            return ""
        self._futures[sequence.slot] = futures
        if all(future.done() for future in futures):
            return ""
        self._count(1)
        self._tell(Obstacle(f"request {sequence.request.request_id!r} waited for its sampler, such as for a grammar"))

        def done(_: Future[Any]) -> None:
            self._done.append(sequence)
            self._wake()

        for future in futures:
            future.add_done_callback(done)
        return COMPILING

    def before_step(self) -> None:
        """Let sequences wait for a step that can run now; end those that are refused."""
        if not self._done:
            return
        state = self._state
        state.clock.hold()
        while self._done:
            sequence = self._done.popleft()
            is_live = state.table.sequences[sequence.slot] is sequence
            if not is_live or sequence.state is not SequenceState.ASIDE:
                continue  # it ended, or another future of its was done before
            futures = self._futures[sequence.slot]
            refusal = _refusal(futures)
            if refusal is not None:
                self._charge(sequence.request, refusal)
                self._ended.append(state.finish(sequence, FinishReason.ERROR, error=str(refusal), refusal=refusal))
            elif all(future.done() for future in futures):
                self._count(-1)
                state.resume(sequence, front=False)

    def leaving(self, sequence: Sequence, leaving: Leaving) -> Claim | None:
        """Give up what a sequence that ends still waits for."""
        if leaving.reason is not None and (futures := self._futures.pop(sequence.slot, ())):
            aside = self._state.aside.get(sequence.slot)
            if aside is not None and aside.reason == COMPILING:
                for future in futures:
                    future.cancel()
                self._count(-1)
        return None

    def _count(self, change: int) -> None:
        gauges = self._state.gauges
        gauges["num_compiling"] = gauges.get("num_compiling", 0) + change
        if not gauges["num_compiling"]:
            self._done.clear()  # who is left in it has ended
        self._take_part(self, gauges["num_compiling"] > 0)


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
