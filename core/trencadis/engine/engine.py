"""The engine: add, step, abort.

    plan n+1 ──▶ submit ──▶ wait for step n ──▶ commit n
        ▲                                         │
        └─────────────────────────────────────────┘

With ``depth`` 2 step n+1 is planned and submitted while step n runs; with depth 1 nothing overlaps. The code is the same.
Texts to embed run beside the steps, a micro-batch each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs
import numpy as np

from trencadis.clock import Clock
from trencadis.engine.accounting import Accounting, SubmittedStep
from trencadis.engine.batch_builder import BatchBuilder
from trencadis.engine.committer import Committer
from trencadis.engine.defragmenter import Defragmenter
from trencadis.engine.drafting import Drafting
from trencadis.engine.embedding import EmbeddingQueue
from trencadis.engine.guards import GuardedScheduling
from trencadis.engine.observers import Observers
from trencadis.engine.recovery import Recovery
from trencadis.engine.request_check import check_request
from trencadis.engine.scheduler import Scheduler
from trencadis.engine.state import EngineState
from trencadis.engine.warmup import WarmUp
from trencadis.errors import (
    ContractError,
    InvalidRequestError,
    RequestRefusedError,
    StepFailedError,
    UnpreparedShapeError,
)
from trencadis.interfaces import Executor
from trencadis.records import (
    Embedding,
    EmbeddingRequest,
    FinishedSequence,
    FinishReason,
    ModelFacts,
    Plan,
    Request,
    TokenDeltas,
)

__all__ = ["Engine"]

_EMPTY = np.empty(0, np.int32)


class Engine:
    """Continuous batching over one executor. All methods are called from one thread.

    Made by :func:`trencadis.engine.build.build_engine`.

    Attributes:
        model: The loaded model.
        max_model_len: Longest sequence, tokens.
        plan_hash: Hash of the resolved plugins, versions and options.
        warm_up: What was prepared before the first request.
        totals: Counters since the start.
    """

    def __init__(
        self,
        *,
        state: EngineState,
        policy: GuardedScheduling,
        scheduler: Scheduler,
        builder: BatchBuilder,
        executor: Executor,
        observers: Observers,
        drafting: Drafting,
        embeddings: EmbeddingQueue,
        model: ModelFacts,
        depth: int,
        plan_hash: str,
        defragmenter: Defragmenter | None = None,
        warm_up: WarmUp | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.plan_hash = plan_hash
        self.warm_up = warm_up or WarmUp()
        self._accounting = Accounting(state, observers)
        self.totals = self._accounting.totals
        self.max_model_len = state.max_model_len
        self._state = state
        self._policy = policy
        self._scheduler = scheduler
        self._builder = builder
        self._executor = executor
        self._observers = observers
        self._drafting = drafting
        self._embeddings = embeddings
        self._defragmenter = defragmenter
        self._committer = Committer(state)
        self._recovery = Recovery(state, scheduler)
        self._depth = depth
        self._clock: Clock = state.clock
        self._in_flight: deque[SubmittedStep] = deque()
        self._ended: list[FinishedSequence] = []
        self._embedded: tuple[Embedding, ...] = ()
        self._closed = False
        self._num_idle_steps = 0
        self._on_close = on_close

    # ------------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> int:
        """Queue a request; returns the slot of its sequence.

        Raises:
            PromptTooLongError: The prompt leaves no room for one output token.
            InvalidRequestError: An empty prompt, a token id outside the vocabulary, or an id that is live.
            RequestRefusedError: The policy's admission control said no.
        """
        self._check(request)
        state = self._state
        refusal = self._policy.admit(
            request, num_waiting=len(state.waiting), num_waiting_tokens=state.num_waiting_tokens
        )
        if refusal:
            raise RequestRefusedError(f"request {request.request_id!r} was refused: {refusal}.")
        slot = state.add(request).slot
        try:
            self._policy.on_added(slot=slot, request=request)
        except StepFailedError as error:
            self._fail_everything(error)
        return slot

    def embed(self, request: EmbeddingRequest) -> None:
        """Queue a text; its vector comes in ``TokenDeltas.embeddings`` of a later step.

        Raises:
            InvalidRequestError: The model cannot embed, an empty text, a token id outside the vocabulary, or an id that is live.
            PromptTooLongError: The model takes no text that long.
        """
        if request.request_id in self._state.slot_of:
            raise InvalidRequestError(
                f"request {request.request_id!r} is live already.", hint="Choose another request id."
            )
        self._embeddings.add(request)

    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request at once, whatever its state.

        Returns:
            Its sequence; None if there is no such request, or if it was a text that waits to be embedded: that is forgotten.
        """
        if self._embeddings.drop(request_id):
            return None
        return self._end(request_id, FinishReason.ABORT)

    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request because its text is complete (a stop string); None if there is no such request."""
        return self._end(request_id, FinishReason.STOP)

    @property
    def has_work(self) -> bool:
        """True while a step can change anything."""
        sequences = self._in_flight or self._ended or self._state.slot_of or self._state.transfers.is_active
        return bool(sequences or self._embeddings)

    @property
    def is_stalled(self) -> bool:
        """True if sequences only wait for a KV connector: stepping at once would be busy waiting."""
        state = self._state
        awaits = state.transfers.is_active or self._scheduler.admission.num_pending
        return bool(awaits and not self._in_flight and not state.running.size and not self._embeddings)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, those parked for a load included."""
        return len(self._state.waiting) + self._state.transfers.num_parked

    # --------------------------------------------------------------------------------------------------- steps

    def step(self) -> TokenDeltas:
        """Embed a micro-batch, submit what can be submitted, wait for the oldest step in flight, and commit it.

        Returns:
            New tokens, finished sequences and embeddings; empty if there was nothing to do.

        Raises:
            InternalError: An invariant does not hold.
        """
        if self._embeddings:
            newest = self._in_flight[-1].plan.num_tokens if self._in_flight else 0
            self._embedded = self._embeddings.run(num_scheduled_tokens=newest)
        while len(self._in_flight) < self._depth and self._submit_next():
            pass
        if not self._in_flight:
            self._watch_progress()
            return self._with_ended(TokenDeltas(slots=_EMPTY, num_tokens=_EMPTY, token_ids=_EMPTY))
        step = self._in_flight.popleft()
        plan = step.plan
        self._num_idle_steps = 0
        try:
            output = step.pending.wait()
        except Exception as error:
            self._fail(plan, error)
            return self._with_ended(TokenDeltas(slots=_EMPTY, num_tokens=_EMPTY, token_ids=_EMPTY))
        start_s = self._clock.now_s()
        deltas = self._committer.commit(plan, output)
        self._recovery.step_done(plan)
        self._drafting.verified(plan, output)
        deltas = self._with_ended(deltas)
        commit_s = self._clock.now_s() - start_s
        self._accounting.committed(step, output, deltas, num_accepted=self._committer.num_accepted, commit_s=commit_s)
        return deltas

    def metrics(self) -> str:
        """Return what observers and backend measured, in Prometheus' text format; empty if none shows any."""
        return self._observers.metrics() + self._executor.metrics()

    def close(self) -> None:
        """End every request, close observers and the executor; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._embeddings.clear()
        for request_id in list(self._state.slot_of):
            self.abort(request_id)
        while self._in_flight:
            self._drain_one()
        self._observers.close()
        try:
            self._on_close()
        finally:
            self._executor.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _submit_next(self) -> bool:
        """Plan and submit one step; False if there is nothing to run."""
        start_s = self._clock.now_s()
        try:
            drafts, draft_slots = self._drafting.propose()
            plan = self._scheduler.plan(drafts, draft_slots)
        except StepFailedError as error:
            self._fail_everything(error)
            return False
        finally:
            self._ended.extend(self._scheduler.failed)
            self._scheduler.failed.clear()
        if plan is None:
            return False
        if self._defragmenter is not None:
            self.totals.num_block_swaps += self._defragmenter.run(plan)
        try:
            batch = self._builder.build(plan)
        except UnpreparedShapeError as error:
            self._refuse(plan, error)
            return True  # something is left to run: what it takes apart, or who was not in it
        except StepFailedError as error:
            self._fail_everything(error)
            return False
        pending = self._executor.submit(batch)
        admission = self._scheduler.admission
        self._in_flight.append(
            SubmittedStep(
                plan=plan,
                pending=pending,
                plan_s=self._clock.now_s() - start_s,
                num_prompt_tokens_admitted=admission.num_prompt_tokens,
                num_prompt_tokens_cached=admission.num_cached_tokens,
                num_recomputed_tokens=self._scheduler.num_recomputed_tokens,
            )
        )
        return True

    def _check(self, request: Request) -> None:
        if request.request_id in self._state.slot_of or request.request_id in self._embeddings:
            raise InvalidRequestError(
                f"request {request.request_id!r} is live already.", hint="Choose another request id."
            )
        check_request(request, vocab_size=self.model.vocab_size, max_model_len=self.max_model_len)

    def _end(self, request_id: str, reason: FinishReason) -> FinishedSequence | None:
        slot = self._state.slot_of.get(request_id)
        if slot is None:
            return None
        sequence = self._state.table.sequence(slot)
        tenant = int(self._state.table.tenant[slot])
        finished = self._state.finish(sequence, reason)
        self._announce(finished, tenant)
        return finished

    def _with_ended(self, deltas: TokenDeltas) -> TokenDeltas:
        """Add embeddings and sequences that ended outside a commit, and announce all that ended."""
        if self._ended or self._embedded:
            ended, self._ended = self._ended, []
            embedded, self._embedded = self._embedded, ()
            deltas = attrs.evolve(deltas, finished=(*deltas.finished, *ended), embeddings=embedded)
        for finished in deltas.finished:
            self._announce(finished, int(self._state.table.tenant[finished.slot]))
        return deltas

    def _announce(self, finished: FinishedSequence, tenant: int) -> None:
        self.totals.num_finished += 1
        self._recovery.left(finished.slot)
        self._drafting.finished(finished.slot)
        try:
            self._policy.on_finished(slot=finished.slot, tenant=tenant, num_output_tokens=len(finished.token_ids))
        except StepFailedError as error:
            self._fail_everything(error)
        if self._observers:
            self._observers.on_request(finished)

    # ------------------------------------------------------------------------------------------------ failures

    def _watch_progress(self) -> None:
        """Quarantine a policy that twice in a row schedules nothing although something could run."""
        state = self._state
        could_admit = len(state.waiting) and not state.blocks.num_used and not self._scheduler.admission.num_pending
        could_run = state.running.size or could_admit
        self._num_idle_steps = self._num_idle_steps + 1 if could_run and not self._ended else 0
        if self._num_idle_steps < 2:
            return
        self._num_idle_steps = 0
        try:
            self._policy.quarantine(
                ContractError(
                    f"it scheduled nothing twice in a row with {len(state.running)} sequences running "
                    f"and {len(state.waiting)} waiting"
                )
            )
        except StepFailedError as error:
            self._fail_everything(error)

    def _fail(self, plan: Plan, error: Exception) -> None:
        self.totals.num_failed_steps += 1
        dropped = []
        while self._in_flight:
            dropped.append(self._drain_one())
        self._ended.extend(self._recovery.step_failed(plan, dropped, error))

    def _refuse(self, plan: Plan, error: UnpreparedShapeError) -> None:
        """Take apart a plan that was not submitted: nobody else needs to fail for its shape."""
        self._fail(plan, error)
        rows = set(plan.rows.tolist())
        self._state.row_starts = [start for start in self._state.row_starts if start.row not in rows]

    def _fail_everything(self, error: StepFailedError) -> None:
        """End every live request: without a working strategy no step can be made."""
        self.totals.num_failed_steps += 1
        while self._in_flight:
            self._drain_one()
        state = self._state
        for slot in list(state.slot_of.values()):
            self._ended.append(state.finish(state.table.sequence(slot), FinishReason.ERROR, error=str(error)))
        state.row_starts.clear()

    def _drain_one(self) -> Plan:
        step = self._in_flight.popleft()
        try:
            output = step.pending.wait()
        except Exception:  # the first failure is the one that is reported
            return step.plan
        self._state.transfers.apply(output.connector_report, self._state)
        return step.plan
