"""The engine's invariants under random histories: those of the kit's policy machine, with every plan, batch and state checked.

The numbers are those in names and messages of tests; each is checked after every event, by :mod:`support.core.invariants`,
:mod:`support.core.scheduling_books`, :mod:`support.core.scheduling_watch` or here. Those left out are tests of the policy:
:mod:`trencadis_testing.scheduling`.

==== ===================================================================================================================
 1   an accepted request is compiling, waiting, waiting for remote KV, running or finished: none is lost or there twice
 2   a request is in one queue, and the only one on its row
 3   only legal moves: admitted from waiting, preempted from running, never back from the end
 4   a step keeps the token budget; no entry is empty
 5   no more than ``max_num_seqs`` run; a scheduled sequence runs
 6   no more tokens are computed than are known, none beyond the model's length
 7   chunks of a prompt follow on each other
 8   a token is sampled exactly when all known ones are computed, once a step
 9   free, cached and used blocks are all; reference counts are the tables that hold a block; what is cached can be found
10   a written token has a block
11   no block is written that others read, or that a transfer holds
12   every block comes back, after aborts in every state and in the middle of transfers too
13   no sequence is preempted and scheduled at once; a preempted one holds no device blocks
14   none is preempted without need
16   none is admitted in a step that preempted, unless for whom it did
18   a request that can never fit is refused when it comes
29   rejected drafts count as not computed; drafts have blocks
30   cached tokens are whole blocks computed for the same salt; one token is left
31   a bucket holds its pass
32   aborts may be repeated; nothing comes after the end
33   times are in order
34   a sequence that waits for a transfer holds its blocks and does not run; a failed load is computed again and never found
35   a paused engine plans nothing, and goes on without a loss
==== ===================================================================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from support.core.invariants import broken_invariants
from support.core.scheduling_books import Books
from support.core.scheduling_watch import PlanWatch, StepWatch
from trencadis.records import FinishedSequence, FinishReason, Request, TokenDeltas
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.scheduling_machine import PolicyMachine

__all__ = ["EngineMachine"]

_MAX_DRAFTS = 3


class EngineMachine(PolicyMachine):
    """One history of an engine; blocks may be taken from it, too."""

    def executor_of(self, backend: FakeBackend) -> StepWatch:
        sizes = type(self).world.sizes
        self.watch = StepWatch(backend, token_budget=self.token_budget, max_num_seqs=sizes["max_num_seqs"])
        return self.watch

    @initialize()
    def build(self) -> None:
        super().build()
        world, sizes = type(self).world, type(self).world.sizes
        self.watch.engine = self.engine
        self.plans = PlanWatch(self.engine, max_drafts=_MAX_DRAFTS if world.has_drafts else 0)
        self.books = Books(block_size=4, max_model_len=self.max_model_len, swaps=sizes["preemption"] == "swap")
        self.withheld: Any = np.empty(0, np.int32)
        self.names: dict[int, str] = {}

    @precondition(lambda self: bool(self.live))
    @rule(
        event=st.sampled_from(["squeeze", "drain", "squeeze"]),
        num_steps=st.integers(4, 7),
        share=st.sampled_from([0.3, 0.7]),
    )
    def take_blocks(self, event: str, num_steps: int, share: float) -> None:
        """Take blocks, or give them back; or take all, so that running sequences are preempted, and abort those."""
        if event == "squeeze":
            self._squeeze(share)
            self._check()
            return
        if not self.withheld.size:
            self._squeeze(1.0)
        for _ in range(num_steps):
            self._step()
        self._abort_preempted()
        if self.withheld.size:
            self._squeeze(0.0)
        self._check()

    def teardown(self) -> None:
        if not getattr(self, "is_sound", False):
            return  # a check has failed already
        if self.withheld.size:
            self._squeeze(0.0)
        super().teardown()
        assert self.engine.inspect().blocks.num_used == 0, "12: a block did not come back"

    def _squeeze(self, share: float) -> None:
        blocks = self.engine._state.blocks
        if self.withheld.size:
            blocks.release(self.withheld, now_s=self.clock.now_s())
            self.withheld = self.withheld[:0]
        else:
            self.withheld = blocks.allocate(int(blocks.num_available * share))
        self.num_withheld_blocks = len(self.withheld)

    def _added(self, request: Request) -> None:
        self.books.open(request)
        self._check()

    def _abort(self, name: str) -> None:
        assert self.engine.abort("nobody") is None, "32: an unknown request was aborted"
        super()._abort(name)
        assert self.engine.abort(name) is None, "32: aborted twice"
        self._check()

    def _pause(self, num_steps: int) -> None:
        num_planned = self.plans.num_plans
        super()._pause(num_steps)
        assert self.plans.num_plans == num_planned, "35: a step was planned in a pause"

    def _step(self) -> None:
        self.names = {sequence.slot: name for name, sequence in self.engine.inspect().sequences.items()}
        super()._step()
        self._check()

    def _stepped(self, deltas: TokenDeltas) -> None:
        for plan in self.plans.take():
            self.books.check_plan(
                plan, self.names, token_budget=self.token_budget, may_admit_beside=self.policy.preempts
            )
        for number, num_emitted in self.watch.take_outputs():
            self.books.committed(number, num_emitted)
        assert {self.names[slot] for slot in deltas.slots.tolist()} <= set(self.live), "32: output after the end"

    def _check(self) -> None:
        faults = broken_invariants(self.engine, withheld=self.withheld.tolist()) + self.watch.faults + self.plans.faults
        assert not faults, faults
        assert set(self.engine.inspect().sequences) == set(self.live), "1, 3: who lives is not who came and did not end"

    def _check_end(self, end: FinishedSequence) -> None:
        if end.finish_reason is FinishReason.ERROR:
            # Alone and still without room: that is for the blocks that were taken away here.
            assert self.withheld.size, end.error
            assert "has no room for this sequence alone" in end.error, end.error
            return
        super()._check_end(end)
        assert end.first_scheduled_s is not None
        assert end.first_token_s is not None
        times = (end.arrival_s, end.first_scheduled_s, end.first_token_s, end.finish_s, self.clock.now_s())
        assert list(times) == sorted(times), f"33: {times}"

    def _leave(self, name: str) -> None:
        self.books.close(name)
        super()._leave(name)
