"""Plan and passes in, batch out: the deltas that bring the device's rows up to date."""

from __future__ import annotations

import attrs

from trencadis.engine.batching.passes import PassPlanner
from trencadis.engine.state import EngineState
from trencadis.records import Batch, Drafts, Plan

__all__ = ["BatchBuilder"]


class BatchBuilder:
    """Builds batches for one engine.

    Args:
        state: The engine's state; its log of row starts and table writes is drained.
        passes: Splits plans.

    Attributes:
        passes: As given; its ``counts`` are those of the last batch.
    """

    def __init__(self, state: EngineState, passes: PassPlanner) -> None:
        self._state = state
        self.passes = passes

    def build(self, plan: Plan) -> Batch:
        """Return the batch of a plan.

        Raises:
            StepFailedError: The bucketing strategy failed and there is no fallback.
        """
        state = self._state
        passes = self.passes.passes(plan, state.rows.block_tables)
        row_starts, state.row_starts = tuple(state.row_starts), []
        return Batch(
            step=plan.step,
            num_sequences=len(plan.slots),
            row_starts=row_starts,
            table_writes=state.rows.take_writes(),
            passes=passes,
            drafts=None if plan.drafts is None else _copied(plan.drafts),
            connector_message=plan.connector_message,
        )


def _copied(drafts: Drafts) -> Drafts:
    """Return the same drafts: the plan is committed by its own numbers, whatever a backend writes to its batch. Pure."""
    return attrs.evolve(drafts, num_drafts=drafts.num_drafts.copy(), token_ids=drafts.token_ids.copy())
