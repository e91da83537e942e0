"""What histories of an engine look at while it plans and while it submits: each plan, each batch, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from support.core.invariants import broken_plan_rules, broken_writes
from trencadis.interfaces import PendingStep
from trencadis.records import Batch, Plan, StepOutput
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend

if TYPE_CHECKING:
    from trencadis.api import Engine

__all__ = ["PlanWatch", "StepWatch"]


class PlanWatch:
    """Records every plan of an engine, and looks at the state right before and right after each.

    Args:
        engine: Watched from now on.
        max_drafts: The most drafts of a sequence in a step.

    Attributes:
        faults: What was wrong, in words.
        num_plans: Plans so far.
    """

    def __init__(self, engine: Engine, *, max_drafts: int) -> None:
        self.faults: list[str] = []
        self.num_plans = 0
        self._plans: list[Plan] = []
        self._state = engine._state
        self._policy = engine._policy
        self._most = 1 + max_drafts
        scheduler = engine._scheduler
        plan_of = scheduler.next_plan

        def plan(*args: Any, **kwargs: Any) -> Plan | None:
            before = set(self._state.running.tolist())
            could_lack = self._most_missing() > self._state.blocks.num_available
            made = plan_of(*args, **kwargs)
            if made is not None:
                self.num_plans += 1
                self._plans.append(made)
                self._look(made, before, could_lack=could_lack)
            return made

        scheduler.next_plan = plan  # type: ignore[method-assign]

    def take(self) -> list[Plan]:
        """Return the plans since the last call."""
        plans, self._plans = self._plans, []
        return plans

    def _most_missing(self) -> int:
        """Return the most blocks that all running sequences together can lack for one more token each, and its drafts."""
        state, table = self._state, self._state.table
        running = state.running
        ends = np.minimum(table.num_computed_tokens[running] + self._most, table.max_total_tokens[running] + 1)
        return int(np.maximum(-(-ends // state.block_size) - table.num_blocks[running], 0).sum())

    def _look(self, plan: Plan, before: set[int], *, could_lack: bool) -> None:
        preempted, scheduled = plan.preempted.tolist(), set(plan.slots.tolist())
        if preempted and not could_lack and not self._policy.preempts:
            self.faults.append(f"14: {preempted} were preempted, and there are blocks for all that run")
        if set(preempted) - before:
            self.faults.append(f"3: {sorted(set(preempted) - before)} did not run and were preempted")
        if scheduled - set(self._state.running.tolist()):
            self.faults.append("5: a sequence is scheduled that does not run")
        remote = set(self._state.aside)
        if scheduled & remote:
            self.faults.append(f"34: {sorted(scheduled & remote)} wait for a transfer and are scheduled")


class StepWatch(FakeExecutor):
    """Checks every batch when it is submitted, and keeps how many tokens each step emitted.

    Args:
        backend: Runs the batches.
        token_budget: Of a step.
        max_num_seqs: Rows.

    Attributes:
        faults: What was wrong, in words.
        engine: The engine; set before the first step.
    """

    def __init__(self, backend: FakeBackend, *, token_budget: int, max_num_seqs: int) -> None:
        super().__init__(backend)
        self.faults: list[str] = []
        self.engine: Any = None
        self._sizes = {"token_budget": token_budget, "max_num_seqs": max_num_seqs}
        self._outputs: list[tuple[int, Sequence[int]]] = []

    def submit(self, batch: Batch) -> PendingStep:
        """Check, and pass on."""
        self.faults += broken_plan_rules(batch, **self._sizes)
        self.faults += broken_writes(batch, self.engine.inspect())
        return _Watched(super().submit(batch), batch.step, self._outputs)

    def take_outputs(self) -> list[tuple[int, Sequence[int]]]:
        """Return the steps that were waited for since the last call, each with the tokens emitted for each of its entries."""
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs


class _Watched:
    """A step whose output is noted when it is waited for."""

    def __init__(self, pending: PendingStep, step: int, outputs: list[tuple[int, Sequence[int]]]) -> None:
        self._pending = pending
        self._step = step
        self._outputs = outputs

    def wait(self) -> StepOutput:
        output = self._pending.wait()
        self._outputs.append((self._step, output.num_emitted.tolist()))
        return output
