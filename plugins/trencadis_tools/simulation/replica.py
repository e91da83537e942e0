"""One replica: a real engine on a simulated device, with a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs

from trencadis.api import Engine
from trencadis.clock import SimulatedClock
from trencadis.errors import RequestError, StepFailedError
from trencadis.records import FinishedSequence, Request, TokenDeltas

__all__ = ["Replica", "Unfinished", "Watcher"]


class Watcher(Protocol):
    """Sees what engines do, in the order in which it happens."""

    def added(self, replica: int, slot: int, request: Request) -> None:
        """Called when an engine has taken a request."""
        ...

    def stepped(self, replica: int, deltas: TokenDeltas) -> None:
        """Called at the end of a step with what it gave."""
        ...


@attrs.frozen
class Unfinished:
    """A request that was on a replica when it failed.

    Attributes:
        request_id: Which.
        token_ids: Tokens that came until then, those of earlier replicas included.
        end: Its sequence, if the replica had begun with it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    end: FinishedSequence | None = None


@attrs.define(eq=False)
class Replica:
    """Steps one engine. Requests that come while a step runs are added after it, as an engine takes them in between two steps.

    Attributes:
        index: Its number.
        serial: Number of its engine among all that were built.
        engine: Of it.
        clock: The engine's.
        refused: Called with each request that the engine or the policy refused.
        watcher: Sees what the engine does, or None.
        inbox: Requests for the next step, in the order in which they came.
        deltas: Of the step that runs, not to be seen before ``clock`` says so; None: no step runs.
        is_scheduled: Its next step, or the end of one, is an event that is to come.
        is_draining: It gets nothing new.
        joins_when_empty: It is started again as soon as it has nothing left.
        sizes: Sequences that wait and run, as :meth:`has_new_load` saw them last.
    """

    index: int
    serial: int
    engine: Engine
    clock: SimulatedClock
    refused: Callable[[Request, RequestError], None]
    watcher: Watcher | None = None
    inbox: deque[Request] = attrs.field(factory=deque)
    deltas: TokenDeltas | None = None
    is_scheduled: bool = False
    is_draining: bool = False
    joins_when_empty: bool = False
    sizes: tuple[int, int] = (0, 0)
    stalled = False  # for the router: nothing hangs here

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.inbox) or self.engine.has_work

    def step(self, now_s: float) -> None:
        """Add what has come, and begin a step: ``clock`` is at its end then, and ``deltas`` is what it will have given.

        Args:
            now_s: When.

        Raises:
            StepFailedError: The policy failed.
        """
        while self.clock.now_s() < now_s:
            self.clock.advance(now_s - self.clock.now_s())
        while self.inbox:
            request = self.inbox.popleft()
            try:
                slot = self.engine.add(request)
            except RequestError as error:
                if isinstance(error.__cause__, StepFailedError):  # the policy failed: it refused no request
                    raise error.__cause__ from None
                self.refused(request, error)
                continue
            if self.watcher is not None:
                self.watcher.added(self.index, slot, request)
        if self.engine.has_work:
            self.deltas = self.engine.step()

    def has_new_load(self, deltas: TokenDeltas) -> bool:
        """Return whether who waits or runs has changed since the last call, or what is cached: a sequence has ended.

        Args:
            deltas: Of the step that has ended.
        """
        sizes = self.engine.num_waiting, self.engine.num_running
        is_new = bool(deltas.finished) or sizes != self.sizes
        self.sizes = sizes
        return is_new

    def fail(self) -> list[Unfinished]:
        """End the engine; returns its requests, those that it had begun first, without what the step that ran had not given yet."""
        hidden = self.deltas
        num_hidden: dict[int, int] = {}
        ended: list[FinishedSequence] = []
        if hidden is not None:
            num_hidden = dict(zip(hidden.slots.tolist(), hidden.num_tokens.tolist(), strict=True))
            ended += hidden.finished
        live = list(self.engine.inspect().sequences)
        ended += [end for one in live if (end := self.engine.abort(one)) is not None]
        left = [
            Unfinished(end.request_id, tuple(end.token_ids[: len(end.token_ids) - num_hidden.get(end.slot, 0)]), end)
            for end in ended
        ]
        left += [Unfinished(request.request_id, request.output_token_ids or ()) for request in self.inbox]
        self.engine.close()
        return left
