"""One replica: a real engine on a simulated device, with a clock of its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs

from trencadis.clock import SimulatedClock
from trencadis.errors import RequestError, StepFailedError
from trencadis.records import EngineLoad, FinishedSequence, Request, TokenDeltas
from trencadis_tools.simulation.executor import SimulatedExecutor
from trencadis_tools.simulation.steady import SteadyEngine

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
    """A request that has left a replica before it ended: the replica failed, or the request is moved.

    Attributes:
        request_id: Which.
        token_ids: Tokens that came until then, those of earlier replicas included.
        end: Ended sequence, if the replica had begun with it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    end: FinishedSequence | None = None


@attrs.define(eq=False)
class Replica:
    """Steps one engine. Requests that come while a step runs are added after it, as an engine takes them in between two steps.

    Attributes:
        index: Index of the replica.
        serial: Number of its engine among all that were built.
        engine: Engine of the replica.
        clock: The engine's.
        refused: Called with each request that the engine or the policy refused.
        watcher: Sees what the engine does, or None.
        inbox: Requests for the next step, in the order in which they came.
        executor: The engine's.
        leaving: Requests that leave when the step that runs has ended.
        deltas: Tokens of the step that runs, not to be seen before ``clock`` says so; None: no step runs.
        ends_s: When the step that runs ends; infinity: none runs.
        is_open: Several steps run whose number is not decided: until ``ends_s``, or until a request comes.
        wakes_s: When a KV transfer ends that all its sequences wait for; infinity: there is none.
        is_scheduled: The next step, or the end of one, is an event that is to come.
        is_there: It serves: it has not failed, and no other engine has its place.
        joins_when_empty: It is started again as soon as it has nothing left.
        reported: Takes its load, for a router; None: there is none.
        sizes: Sequences that wait and run, as the router knows them.
        is_stretch: The steps that run, or ran last, are several.
        token_times: Times of the tokens of each request that was sent, by id; None: not noted.
        times_of: The same by slot.
    """

    index: int
    serial: int
    engine: SteadyEngine
    clock: SimulatedClock
    executor: SimulatedExecutor
    refused: Callable[[Request, RequestError], None]
    watcher: Watcher | None = None
    inbox: deque[Request] = attrs.field(factory=deque)
    leaving: list[str] = attrs.field(factory=list)
    deltas: TokenDeltas | None = None
    ends_s: float = math.inf
    wakes_s: float = math.inf
    is_open: bool = False
    is_scheduled: bool = False
    is_there: bool = False
    joins_when_empty: bool = False
    reported: Callable[[int, EngineLoad], None] | None = None
    sizes: tuple[int, int] = (0, 0)
    is_stretch: bool = False
    token_times: dict[str, list[float]] | None = None
    times_of: dict[int, list[float]] = attrs.field(factory=dict)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.inbox) or self.engine.has_work

    def step(self, now_s: float) -> None:
        """Add what has come, and begin a step that ends at ``ends_s``: ``deltas`` is what it will have given, unless it is open.

        Where a KV transfer is all that there is to wait for, no step runs, and ``wakes_s`` says until when.

        Args:
            now_s: When.

        Raises:
            StepFailedError: The policy failed.
        """
        self.wakes_s = math.inf
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
            if self.token_times is not None:
                self.times_of[slot] = self.token_times[request.request_id]
            if self.watcher is not None:
                self.watcher.added(self.index, slot, request)
        self.report()
        if not self.engine.has_work:
            return
        if not self.engine.is_steady:
            deltas = self.engine.step()
            if self.executor.idle_until_s > self.clock.now_s():
                self.wakes_s = self.executor.idle_until_s
                return
            if deltas.slots.size or deltas.finished or not self.engine.is_steady:
                self.deltas, self.ends_s, self.is_stretch = deltas, self.clock.now_s(), False
                return
        assert self.executor.stretch is not None, "it is what is open"
        self.is_open, self.ends_s = True, self.executor.stretch.end_s

    def close(self, now_s: float) -> None:
        """Decide how many steps there are: those that have begun by now."""
        self.executor.timeline.until_s = now_s
        self.deltas, self.is_open, self.ends_s = self.engine.step(), False, self.clock.now_s()
        self.is_stretch = True

    def note_times(self, deltas: TokenDeltas, *, has_ended: bool = True) -> None:
        """Note when tokens came.

        Args:
            deltas: Tokens of the step, or of the steps, that were waited for last.
            has_ended: Otherwise the last step gave nothing yet.
        """
        times = [end_s for end_s, _ in self.executor.timeline.ended[:-1]]
        if has_ended:
            times.append(self.clock.now_s())
        for slot, num_tokens in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            self.times_of[slot] += times if self.is_stretch else times * num_tokens

    def report(self, *, has_ended: bool = False) -> None:
        """Tell the router what waits, runs and is cached, if that has changed: it changes when a sequence comes, begins to run or ends.

        Args:
            has_ended: One has ended.
        """
        sizes = self.engine.num_waiting, self.engine.num_running
        if self.reported is not None and (has_ended or sizes != self.sizes):
            self.sizes = sizes
            self.reported(self.index, self.engine.load())

    def output_lens(self, now_s: float) -> dict[str, int]:
        """Return the output tokens that came until now of each request that it has, by id."""
        hidden = self._num_hidden(self.deltas)
        num_ended = 0
        if self.is_open:
            assert self.executor.stretch is not None, "it is what is open"
            num_ended = self.executor.stretch.num_ended(now_s)
        lens = {
            name: num - hidden.get(slot, 0) + num_ended * runs
            for name, (slot, num, runs) in self.engine.output_lens().items()
        }
        if self.deltas is not None:
            for end in self.deltas.finished:
                lens[end.request_id] = len(end.token_ids) - hidden.get(end.slot, 0)
        return lens | {request.request_id: len(request.output_token_ids or ()) for request in self.inbox}

    def withdraw(self, request_id: str) -> Unfinished:
        """Take a request out that has not ended; no step runs."""
        end = self.engine.withdraw(request_id)
        if end is not None:
            return Unfinished(request_id, tuple(end.token_ids), end)
        (request,) = [one for one in self.inbox if one.request_id == request_id]
        self.inbox.remove(request)
        return Unfinished(request_id, request.output_token_ids or ())

    def fail(self, now_s: float) -> list[Unfinished]:
        """End the engine; returns its requests, those that it had begun first, without what the step that ran had not given yet.

        Args:
            now_s: When.
        """
        self.executor.fail(now_s)
        self.wakes_s = math.inf
        if self.deltas is not None and self.token_times is not None:
            self.note_times(self.deltas, has_ended=False)
        left = self._unfinished(self.deltas)
        left += [Unfinished(request.request_id, request.output_token_ids or ()) for request in self.inbox]
        self.engine.close()
        return left

    def _num_hidden(self, deltas: TokenDeltas | None) -> dict[int, int]:
        """Return by slot how many tokens the step that runs has given which have not come; of None none."""
        if deltas is None:
            return {}
        # Of a stretch of steps the last one alone has not ended; another one may have accepted drafts.
        counts = [1] * len(deltas.slots) if self.is_stretch else deltas.num_tokens.tolist()
        return dict(zip(deltas.slots.tolist(), counts, strict=True))

    def _unfinished(self, hidden: TokenDeltas | None) -> list[Unfinished]:
        """End what the engine has begun; returns it, what ended in the step that runs first, then by order of arrival.

        Args:
            hidden: Tokens of that step, or None: no step runs.
        """
        num_hidden = self._num_hidden(hidden)
        ended = [] if hidden is None else list(hidden.finished)
        live = list(self.engine.inspect().sequences)
        ended += [end for one in live if (end := self.engine.abort(one)) is not None]
        return [
            Unfinished(end.request_id, tuple(end.token_ids[: len(end.token_ids) - num_hidden.get(end.slot, 0)]), end)
            for end in ended
        ]
