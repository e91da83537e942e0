"""What an engine does about steps that failed, plans that were refused, and ranks that were lost."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.engine.batching.passes import BatchBuilder
from trencadis.engine.commit.endings import Endings
from trencadis.engine.commit.in_flight import StepsInFlight
from trencadis.engine.commit.recovery import Recovery, restart_ranks
from trencadis.engine.inspect.accounting import Accounting
from trencadis.engine.stage import Stages
from trencadis.engine.state import EngineState
from trencadis.errors import RanksLostError
from trencadis.interfaces import Executor
from trencadis.records import Plan

__all__ = ["Failures"]


class Failures:
    """Undoes what failed in one engine, so that every sequence goes on with the tokens that it has.

    Args:
        state: The engine's state; changed.
        executor: Started again where its ranks were lost.
        batches: Builds batches; its passes are told of what started ranks have prepared.
        stages: Stages, which are told.
        recovery: Finds the sequence at fault.
        endings: Announces the end of sequences that are at fault.
        accounting: Counts failed steps.
        in_flight: Submitted steps, dropped: those after a failed one used its tokens.
    """

    def __init__(
        self,
        state: EngineState,
        executor: Executor,
        batches: BatchBuilder,
        stages: Stages,
        recovery: Recovery,
        endings: Endings,
        accounting: Accounting,
        in_flight: StepsInFlight,
    ) -> None:
        self._state = state
        self._executor = executor
        self._batches = batches
        self._stages = stages
        self._recovery = recovery
        self._endings = endings
        self._accounting = accounting
        self._in_flight = in_flight

    def step_failed(self, plan: Plan, error: Exception) -> None:
        """Undo a step that failed, and the steps in flight after it.

        Raises:
            BackendError: Ranks were lost, and cannot be started; the engine has failed.
        """
        self._accounting.totals.num_failed_steps += 1
        self._state.clock.hold()
        plans = [plan, *self._in_flight.drain()]
        for failed in self._stages.failed:
            failed(plans, error)
        if isinstance(error, RanksLostError):
            self._start_again(plans, error)
        else:
            self._endings.ended.extend(self._recovery.step_failed(plan, plans[1:], error))

    def refused(self, plan: Plan, error: Exception) -> None:
        """Undo a plan that was not submitted."""
        self.step_failed(plan, error)
        rows = set(plan.rows.tolist())
        self._state.row_starts = [start for start in self._state.row_starts if start.row not in rows]

    def ranks_lost(self, error: RanksLostError) -> None:
        """Start ranks again that were lost outside a step.

        Raises:
            BackendError: They cannot be started; the engine has failed.
        """
        for failed in self._stages.failed:
            failed((), error)
        self._start_again((), error)

    def _start_again(self, plans: Sequence[Plan], error: RanksLostError) -> None:
        self._state.clock.hold()
        self._in_flight.drain()
        self._endings.ended.extend(self._recovery.ranks_lost(plans, error))
        restart_ranks(self._executor, error)
        self._batches.passes.start_again(self._batches.warm_up.report.prepared)
