"""The engine: add, step, abort.

    plan n+1 ──▶ submit ──▶ wait for step n ──▶ commit n
        ▲                                         │
        └─────────────────────────────────────────┘

With ``depth`` 2 step n+1 is planned and submitted while step n runs, with more so many steps; with depth 1 nothing overlaps. The code is the
same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.clock import Clock
from trencadis.config import Config
from trencadis.engine.batching.passes import BatchBuilder
from trencadis.engine.commit.committer import Committer, StopCheck
from trencadis.engine.commit.endings import Endings
from trencadis.engine.commit.failures import Failures
from trencadis.engine.commit.in_flight import StepsInFlight
from trencadis.engine.commit.output_check import FailedStep, OutputCheck
from trencadis.engine.commit.recovery import Recovery
from trencadis.engine.inspect.accounting import Accounting
from trencadis.engine.inspect.answers import answered
from trencadis.engine.inspect.off import off_table
from trencadis.engine.inspect.snapshot import EngineSnapshot, take_snapshot
from trencadis.engine.request_validation import RequestValidator
from trencadis.engine.scheduling.progress import Progress
from trencadis.engine.scheduling.scheduler import Scheduler
from trencadis.engine.stage import EngineParts, Stages
from trencadis.engine.state import EngineState
from trencadis.engine.step import Obstacle, SchedulingChanged
from trencadis.errors import (
    InvalidRequestError,
    RanksLostError,
    RequestError,
    RequestRefusedError,
    StepFailedError,
    UnpreparedShapeError,
)
from trencadis.faults import FaultLog, as_words, reraise_interrupt
from trencadis.interfaces import Executor
from trencadis.interfaces.restorable import Restorable
from trencadis.records import (
    BucketLimits,
    EngineLoad,
    FinishedSequence,
    FinishReason,
    Request,
    TokenDeltas,
)

__all__ = ["Engine"]

_MAX_IDLE_STEPS = 2
"""A policy that schedules nothing so often in a row, although something could run, is at fault."""

_EMPTY = np.empty(0, np.int32)
_NO_COUNTERS = '# The engine counts nothing here: no observer shows metrics. Set observer.names to ["prometheus"].\n'
_NOTHING = TokenDeltas(slots=_EMPTY, num_tokens=_EMPTY, token_ids=_EMPTY)
# Members of an enum are slow to look up.
_SCHEDULING, _FORWARD = EnginePhase.SCHEDULING, EnginePhase.FORWARD
_COMMITTING, _COMPILING = EnginePhase.COMMITTING, EnginePhase.COMPILING


class Engine:
    """Continuous batching over one executor. All methods are called from one thread.

    Made by :func:`trencadis.engine.build.build_engine`.

    Attributes:
        model: The loaded model.
        max_model_len: Longest sequence, tokens.
        warm_up: Buckets that were prepared before the first request.
        totals: Counters since the start.
        hashing: Compatibility key of block hashes, and tokens per block; None without prefix caching.
        is_paused: Set it, and no more steps are planned; those in flight end, requests may come and go, and none is lost.
        wake: Called from any thread when there is work between two steps; see :meth:`wake_by`.
    """

    def __init__(
        self,
        *,
        state: EngineState,
        scheduler: Scheduler,
        batches: BatchBuilder,
        executor: Executor,
        validator: RequestValidator,
        stages: Stages,
        accounting: Accounting,
        depth: int,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = validator.model
        self.max_model_len = state.max_model_len
        self.warm_up = batches.warm_up
        self.totals = accounting.totals
        hasher = state.hasher
        self.hashing = (hasher.compatibility, hasher.block_size) if state.prefix_caching else None
        self.is_paused = False
        self.wake: Callable[[], None] = lambda: None
        self._state = state
        self._time = state.clock
        self._clock: Clock = state.clock.source
        self._scheduler = scheduler
        self._policy = scheduler.policy
        self._batches = batches
        self._executor = executor
        self._validator = validator
        self._stages = stages
        self._accounting = accounting
        self._depth = depth
        self._on_close = on_close
        self._closed = False
        self._faults = FaultLog(logging.getLogger("trencadis.engine"))
        self._outputs = OutputCheck(vocab_size=self.model.vocab_size, label=accounting.label, stages=stages)
        self._recovery = Recovery(state)
        self._in_flight = StepsInFlight(self._outputs, stages)
        self._endings = Endings(state, scheduler.policy, stages, self._recovery, accounting, self._in_flight)
        self._failures = Failures(
            state, executor, batches, stages, self._recovery, self._endings, accounting, self._in_flight
        )
        self._progress = Progress(state, scheduler, self._in_flight, self._endings.end_everything)

    def bind(self, config: Config, limits: BucketLimits) -> None:
        """Give the stages the parts that they use, and call them at their moments from now on; called once.

        Args:
            config: The whole configuration.
            limits: Sizes of the engine.
        """
        state, scheduler, stages = self._state, self._scheduler, self._stages

        def wake() -> None:  # whoever is called by then
            self.wake()

        def tell(notice: Obstacle | SchedulingChanged) -> None:
            for hear in stages.hear:
                hear(notice)

        parts = EngineParts(
            config=config,
            state=state,
            executor=self._executor,
            model=self.model,
            limits=limits,
            depth=self._depth,
            policy=self._policy,
            in_flight=self._in_flight,
            kept={
                "scheduler": scheduler,
                "order": scheduler.admission.cached_order,
                "preemptor": scheduler.preemptor,
                "recovery": self._recovery,
                "policy": self._policy,
                **{stage.name: stage for stage in stages.all if isinstance(stage, Restorable)},
            },
            add=self.add,
            abort=self.abort,
            append=StopCheck(state).append,
            ended=self._endings.ended,
            wake=wake,
            tell=tell,
            warm_up=self.warm_up,
            buckets=self._batches.passes,
            take_part=stages.take_part,
            totals=self.totals,
        )
        for stage in stages.called:
            stage.bind(parts)
        self._committer = Committer(state)  # of a state to which the stages subscribe
        state.leaving = stages.leaving
        scheduler.admission.claims = stages.claim
        asks = stages.wants_empty_plan
        if asks:
            scheduler.wants_step = lambda: any(ask() for ask in asks)
        self._takes = {kind: take for stage in stages.all for kind, take in stage.takes.items()}
        self._answers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "totals": lambda _: {**attrs.asdict(self.totals), "drafter": ""},
            "switched_off": lambda _: off_table(),
            **{question: answer for stage in stages.all for question, answer in stage.answers.items()},
        }

    # ------------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> int:
        """Queue a request; returns the slot of its sequence.

        Raises:
            PromptTooLongError: The prompt leaves no room for one output token.
            InvalidRequestError: An empty prompt, a token id outside the vocabulary, or an id that is live.
            RequestRefusedError: A stage refuses it, or the policy's admission control said no.
        """
        state, stages, original_request = self._state, self._stages, request
        self._time.hold()
        try:
            request = self._validator.admit(request, stages.accept, stages.accept_last)
        except RequestError:
            for refused in stages.refused:
                refused(original_request)
            raise
        except StepFailedError as error:
            for refused in stages.refused:
                refused(original_request)
            self._endings.end_everything(error)
            raise RequestRefusedError(f"request {request.request_id!r} was refused: {error}") from error
        sequence = state.add(request, original_request=original_request)
        slot = sequence.slot
        obstacles = [words for words in [added(sequence) for added in stages.added] if words]
        if obstacles:
            state.set_aside(sequence, obstacles[0], is_queued=True, num_holds=len(obstacles))
        else:
            state.enqueue(sequence)
        try:
            self._policy.on_added(slot=slot, request=request)
        except StepFailedError as error:
            self._endings.end_everything(error)
        return slot

    def take(self, request: Any) -> None:
        """Queue a request of another kind, which a stage serves; what becomes of it comes with a later step.

        Raises:
            RequestError: The stage refuses it.
            InvalidRequestError: No stage serves this kind.
        """
        queue = self._takes.get(type(request))
        if queue is None:
            raise InvalidRequestError(f"no stage of this engine serves a {type(request).__name__}.")
        try:
            queue(request)
        except RequestError:
            raise
        except Exception as error:
            said = f"a {type(request).__name__} was refused: its stage raised {as_words(error)}."
            self._faults.say("take", said, error=error)
            raise RequestRefusedError(said) from error

    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request at once, whatever its state.

        Returns:
            Its sequence; None if there is no such request, or if it is of a kind that a stage serves: it is forgotten.
        """
        for drop in self._stages.drop:
            if drop(request_id):
                return None
        return self._endings.end(request_id, FinishReason.ABORT)

    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request because its text is complete (a stop string); None if there is no such request."""
        return self._endings.end(request_id, FinishReason.STOP)

    def withdraw(self, request_id: str) -> FinishedSequence | None:
        """End a request that another engine goes on with, with ``FinishReason.MOVED``.

        Returns:
            Its sequence; None if there is no such request, or if its tokens do not determine how it goes on.
        """
        slot = self._state.slot_of.get(request_id)
        if slot is None:
            return None
        sequence = self._state.table.sequence(slot)
        has_output = self._state.table.num_known_tokens[slot] > self._state.table.num_prompt_tokens[slot]
        if has_output and not self._validator.sampling.is_portable(sequence.request.params):
            return None
        return self._endings.end(request_id, FinishReason.MOVED)

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when a sequence can run or a stage has work between two steps."""
        self.wake = wake

    @property
    def has_work(self) -> bool:
        """True while a step can change anything."""
        return bool(self._in_flight or self._endings.ended or self._state.slot_of or self._stages.wants_step)

    @property
    def is_stalled(self) -> bool:
        """True if sequences only wait for a stage, or the engine is paused: stepping at once would be busy waiting."""
        state = self._state
        awaits = (
            self.is_paused
            or (state.aside and not len(state.waiting))
            or self._stages.awaits
            or self._scheduler.admission.num_pending
        )
        could_run = state.running.size and not self.is_paused
        computes = any(step.plan.num_tokens for step in self._in_flight)
        return bool(awaits and not computes and not could_run and not self._stages.are_busy)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, those that stand aside included."""
        return self._state.num_waiting

    # --------------------------------------------------------------------------------------------------- steps

    def step(self) -> TokenDeltas:
        """Submit what can be submitted, wait for the oldest step in flight, and commit it.

        Returns:
            New tokens, finished sequences and what stages add; empty if there was nothing to do.

        Raises:
            InternalError: An invariant does not hold.
        """
        try:
            for act in self._stages.before_step:
                act()
        except RanksLostError as error:
            self._failures.ranks_lost(error)
        while not self.is_paused and len(self._in_flight) < self._depth and self._submit_next():
            pass
        return self._commit_oldest()

    def work_ahead(self) -> float | None:
        """Let stages use idle time. A request that arrives meanwhile waits for it.

        Returns:
            Seconds until the next call may find something to do; None: nothing is left, or there are requests to serve.
        """
        if not self._stages.idle or self.has_work:
            return None
        pauses = [idle() for idle in self._stages.idle]
        return min([pause_s for pause_s in pauses if pause_s is not None], default=None)

    @property
    def plan_hash(self) -> str:
        """Hash of the resolved plugins, versions and options; changes with the scheduling policy."""
        return self._state.plan_hash

    def answer(self, question: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to an operator's question, or make a change.

        The engine's own: ``totals``, the fields of :class:`~trencadis.records.EngineTotals`; and ``switched_off``. Stages have their own.

        Raises:
            TrencadisError: See :func:`~trencadis.engine.inspect.answers.answered`.
        """
        return answered(question, arguments, self._answers)

    @property
    def dumps(self) -> tuple[Callable[[str, str], Path | None], ...]:
        """What writes the last steps to a file, from any thread, also while the engine hangs; see :meth:`~trencadis.engine.stage.Stage.dump`."""
        return self._stages.dump

    def stage(self, name: str) -> Any:
        """Return a stage by name, for tests and debuggers.

        Raises:
            KeyError: The engine has none of this name.
        """
        return {stage.name: stage for stage in self._stages.all}[name]

    def inspect(self) -> EngineSnapshot:
        """Return a copy of the engine's state, for tests, conformance suites and debuggers. O(sequences + blocks)."""
        return take_snapshot(
            self._state,
            steps_in_flight=(step.plan.step for step in self._in_flight),
            stages=self._stages.called,
        )

    def output_lens(self) -> dict[str, tuple[int, int, bool]]:
        """Return slot, known output tokens and whether it runs of every live request, by request id. O(requests)."""
        table = self._state.table
        lens, rows = (table.num_known_tokens - table.num_prompt_tokens).tolist(), table.row.tolist()
        return {name: (slot, lens[slot], rows[slot] >= 0) for name, slot in self._state.slot_of.items()}

    def load(self) -> EngineLoad:
        """Return how much there is to do, and how the prefix cache has changed since the last call; the first tells all of it."""
        blocks = self._state.blocks
        added, removed = blocks.take_changes()
        return EngineLoad(
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            kv_usage=blocks.num_used / blocks.num_blocks,
            added=tuple(added),
            removed=tuple(removed),
        )

    def metrics(self) -> str:
        """Return what observers and backend measured, in Prometheus' text format; a comment says so if no observer counts."""
        return self._accounting.metrics(self._stages.called, self._executor)

    def close(self) -> None:
        """End every request, close observers and the executor; may be called twice."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._state.slot_of):
            self.abort(request_id)
        self._in_flight.drain()
        # A last step if a stage has orders left for the executor's side, such as to save what was computed last.
        with contextlib.suppress(Exception):  # of an executor that is dead already
            for _ in range(2):  # first what a refused plan had for it, if there is any
                if self._stages.has_orders and self._submit_next() and self._in_flight:
                    self._in_flight.drain_one()
        self._accounting.close()
        try:
            for stage in self._stages.called:
                stage.close()
            self._on_close()
        finally:
            self._executor.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _commit_oldest(self) -> TokenDeltas:
        """Wait for the oldest step in flight and commit it; the deltas of all requests, remote prefills included."""
        if not self._in_flight:
            self._progress.watch(is_excused=self.is_paused or bool(self._endings.ended))
            return self._stages.end_step(None, None, self._endings.announce_all(_NOTHING))
        step = self._in_flight.popleft()
        plan = step.plan
        if plan.num_tokens:
            self._progress.num_idle_steps = 0
        else:
            self._progress.watch(is_excused=self.is_paused or bool(self._endings.ended))
        compiles = step.pass_counts.compiles
        step.wait_s = self._clock.now_s()
        ACTIVITY.begin_step(plan.step, _COMPILING if compiles else _FORWARD)
        try:
            output = self._outputs.output_of(step)
        except Exception as error:
            self._failures.step_failed(plan, error)
            return self._stages.end_step(None, None, self._endings.announce_all(_NOTHING))
        step.output_s = self._time.held_s = self._clock.now_s()
        ACTIVITY.end_step(_COMMITTING, took_s=None if compiles else step.output_s - step.wait_s)
        for received in self._stages.received:
            received(step, output)
        deltas = self._committer.commit(plan, output)
        step.num_kept = self._committer.num_kept
        if self._recovery.suspects:
            self._recovery.step_done(plan)
        if deltas.finished or self._endings.ended:
            deltas = self._endings.announce_all(deltas)
        step.commit_s = self._clock.now_s() - step.output_s
        shown = self._stages.end_step(step, output, deltas)
        self._accounting.committed(step, output, deltas)
        return shown

    def _submit_next(self) -> bool:
        """Plan and submit one step; False if there is nothing to run."""
        ACTIVITY.begin(_SCHEDULING)
        start_s = self._time.held_s = self._clock.now_s()
        scheduler, plan = self._scheduler, None
        try:
            plan = scheduler.next_plan(self._recovery.suspects)
        except StepFailedError as error:
            self._endings.end_everything(error)
        if scheduler.failed:
            self._endings.ended.extend(scheduler.failed)
            scheduler.failed.clear()
        if plan is None:
            for after_plan in self._stages.after_plan:
                after_plan(None)
            return False
        step = self._accounting.planned(plan, scheduler)
        try:
            for after_plan in self._stages.after_plan:
                after_plan(step)
        except Exception as error:
            self._failures.refused(plan, error)
            return True
        try:
            batch = self._batches.build(plan)
        except UnpreparedShapeError as error:
            self._failures.refused(plan, error)
            return True  # the other sequences of the plan can run, and those that were not in it
        except StepFailedError as error:
            self._endings.end_everything(error)
            return False
        try:
            for after_build in self._stages.after_build:
                batch = after_build(step, batch) or batch
        except Exception as error:
            self._failures.refused(plan, error)
            return True
        counts = step.pass_counts = self._batches.passes.counts
        step.passes, step.start_s = batch.passes, start_s
        ACTIVITY.begin_step(plan.step, _COMPILING if counts.compiles else _FORWARD)
        try:
            step.pending = self._executor.submit(batch)
        except BaseException as error:  # it fails as one that ran, for its rows and tables are drained
            reraise_interrupt(error)
            step.pending = FailedStep(error)
        step.plan_s = self._clock.now_s() - start_s
        self._in_flight.append(step)
        return True
