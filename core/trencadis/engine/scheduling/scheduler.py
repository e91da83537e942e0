"""Who runs how many tokens in the next step: queues, policy and blocks in, a plan out.

Running sequences come first: decodes as one array operation, then unfinished prefills in chunks, then new admissions with what
is left of the token budget. A sequence gets blocks for all its known tokens when it is admitted, so only decodes can
run out of blocks; then the policy names victims until the rest fit, and no waiting sequence is scheduled in that step. Before all that, a
policy that preempts may have running sequences preempted for a waiting one, the most urgent first. Tokens to
verify come last: they get budget and blocks that no other sequence could use, and give the blocks back before the next plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trencadis.engine.scheduling.admission import Admission
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.scheduling.views import ViewMaker
from trencadis.engine.sequences import SequenceState
from trencadis.engine.state import EngineState
from trencadis.engine.step import Proposal
from trencadis.errors import InternalError
from trencadis.interfaces import SchedulerView, TokenSplit
from trencadis.interfaces.restorable import Restorable
from trencadis.records import Drafts, FinishedSequence, FinishReason, Int32Array, Int64Array, Plan, read_only

__all__ = ["Preemptor", "Scheduler"]

_EMPTY = np.empty(0, np.int32)
_MAX_TRIES = 16
"""Waiting sequences for which room is sought in a step; about 30 µs each."""
# Of short arrays ``1 in mask.tobytes()`` takes a tenth of ``mask.any()``, and ``0 not in`` that of ``all()``.


class Scheduler(Restorable):
    """Makes plans for one engine.

    Args:
        state: The engine's state; changed by :meth:`next_plan`.
        policy: The guarded scheduling policy.
        max_num_batched_tokens: Token budget of a step.
        max_preemptions: Sequences preempted more often are spared while others are left.
        max_wait_s: Sequences that waited longer are admitted first.
        propose: Called before each plan; returns tokens that it may verify, or None. None: there never are any.

    Attributes:
        policy: The guarded scheduling policy.
        propose: The argument.
        failed: Sequences that ended while the newest plan was made.
        views: Makes the views that the policy is given.
        preemptor: Preempts running sequences for waiting ones.
        verifies: The newest plan verifies tokens, which may have got blocks in vain.
        next_step: Number of the next plan.
        num_recomputed_tokens: Tokens of the newest plan that were computed before a preemption.
        wants_step: Returns whether a plan without any sequence is useful all the same.
    """

    restored = ("next_step", "verifies")

    def __init__(
        self,
        state: EngineState,
        policy: GuardedScheduling,
        *,
        max_num_batched_tokens: int,
        max_preemptions: int,
        max_wait_s: float,
        propose: Callable[[], Proposal | None] | None = None,
    ) -> None:
        self._state = state
        self.policy = self._policy = policy
        self.propose = propose
        self._runnable = policy.runnable
        self._budget = max_num_batched_tokens
        self._max_preemptions = max_preemptions
        self.views = ViewMaker(state)
        self._blocks = state.blocks  # from which decodes get theirs
        self.admission = Admission(state, policy, max_wait_s=max_wait_s)
        self.preemptor = Preemptor(state, policy, self.admission, max_preemptions=max_preemptions)
        self.wants_step: Callable[[], bool] = lambda: False
        self.next_step = 0
        self._preempted: list[int] = []
        self.verifies = False
        self._running: Int32Array | None = None
        self._places: Int64Array = np.empty(0, np.int64)
        self._rows: Int32Array = _EMPTY
        self._epochs: Int64Array = self._places
        self._ones, self._trues = _constant(64, np.int32), _constant(64, np.bool_)
        self.failed: list[FinishedSequence] = []
        self.num_recomputed_tokens = 0

    def next_plan(self, suspects: Sequence[int] = ()) -> Plan | None:
        """Return the next plan, with tokens to verify if some were proposed, or None if nothing can run now.

        Mutates the state: allocates blocks, preempts, admits, and counts scheduled tokens as computed.

        Args:
            suspects: Slots of a failed step that run alone, the first of them now.

        Raises:
            StepFailedError: A policy failed for good.
        """
        state, table = self._state, self._state.table
        proposal = None if self.propose is None else self.propose()
        self._preempted = []
        self.num_recomputed_tokens = 0
        if self.admission.has_outcome:
            self.admission.begin()
        if self.verifies:
            self._take_back()
        view, order = self.views.view(), None
        facts = state.facts
        facts.clear()
        facts.append(("begin", self.next_step, len(view.waiting), view.num_free_blocks))
        if suspects:
            return self._plan_alone(suspects[0])
        if view.waiting.size and self._policy.preempts:
            view, order = self._preempt_for_waiting(view)
        num_preempted_for = len(self._preempted)
        active = state.running
        if active is not self._running:
            self._find_places(active)
        places = self._places
        num_tokens = table.num_tokens[places]
        unfinished = num_tokens < table.max_total_tokens[places]
        if self._runnable is not None:
            unfinished = self._runnable(places)
        if self._runnable is not None or 0 in unfinished.tobytes():
            active, places, num_tokens = active[unfinished], places[unfinished], num_tokens[unfinished]
        if not active.size and not state.waiting.slots.size:
            return self._finish_plan(active, _EMPTY)
        split = self._policy.split(view, token_budget=self._budget)
        computed = table.num_computed_tokens[places]
        ends = computed + 1
        all_decode = ends.tobytes() == num_tokens.tobytes()
        decodes = active if all_decode else active[ends == num_tokens]
        facts.append(("split", split, active, decodes))
        is_settled = not state.waiting.slots.size or (order is None and not state.rows.num_free)
        if all_decode and active is state.running and proposal is None and is_settled:
            plan = self._plan_decodes(view, split, places, computed, ends)
            if plan is not None:
                return plan
        is_decode = ends == num_tokens
        decodes = decodes[: min(split.decode, self._budget)]
        decodes, lengths = self._allocate(view, decodes, np.ones(len(decodes), np.int32))
        left = min(self._budget - int(lengths.sum()), split.prefill)
        slots, counts = [decodes], [lengths]
        if not all_decode and left > 0:
            self._continue_prefills(view, active[~is_decode], left, slots, counts)
            left -= sum(int(c.sum()) for c in counts[1:])
        facts.append(("left", left))
        if len(self._preempted) == num_preempted_for and left > 0 and state.waiting.slots.size:
            admitted, chunks = self.admission.admit(self.views.view(), token_budget=left, order=order)
            slots.append(admitted)
            counts.append(chunks)
        if proposal is not None and decodes.size:
            used = sum(int(c.sum()) for c in counts)
            most = min(self._budget - used, split.decode - len(decodes))
            decodes, counts[0] = self._extend(view, decodes, most, proposal)
        return self._finish_plan(np.concatenate(slots), np.concatenate(counts), proposal)

    def _preempt_for_waiting(self, view: SchedulerView) -> tuple[SchedulerView, Int32Array]:
        """Preempt whom the policy names for a waiting sequence; returns the view after it, and the order of admission."""
        order = self.admission.cached_order.order(view).copy()
        self._preempted = self.preemptor.preempt(view, order)
        order = self.admission.ranked_by_age(view, order, first=self.preemptor.has_room)
        return self.views.view(), order

    # ---------------------------------------------------------------------------------------------- decodes

    def _plan_decodes(
        self, view: SchedulerView, split: TokenSplit, places: Int64Array, computed: Int64Array, ends: Int64Array
    ) -> Plan | None:
        """Plan a token for each running sequence where nothing else is to be decided; None if something is.

        This is what :meth:`next_plan` comes to then, and what nearly all steps are: nothing waits that could get a row, every sequence decodes,
        and blocks and budgets are enough.

        Args:
            view: The state.
            split: The division of the budget by the policy.
            places: All running slots.
            computed: Their computed tokens.
            ends: One more, all their known tokens.
        """
        state, table, number = self._state, self._state.table, len(places)
        if not number or number > min(split.decode, self._budget) or self._preempted:
            return None
        if table.was_preempted and 1 in (table.high_water[places] > computed).tobytes():
            return None  # tokens are computed again, which are counted
        if len(self._ones) < number:
            self._ones, self._trues = _constant(2 * number, np.int32), _constant(2 * number, np.bool_)
        if 1 in (table.num_blocks[places] * state.block_size < ends).tobytes():
            if number > state.blocks.num_available:  # so many may be missing
                return None
            self._allocate(view, state.running, self._ones[:number])
        left = min(self._budget - number, split.prefill)
        state.facts.append(("left", left))
        if left > 0 and state.waiting.slots.size:
            state.facts.append(("stop", "rows"))
        self.verifies = False
        table.num_computed_tokens[places] = ends
        table.num_tokens[places] = ends + 1
        plan = Plan(
            step=self.next_step,
            slots=state.running,
            rows=self._rows,
            epochs=self._epochs,
            starts=computed.astype(np.int32),
            num_scheduled=self._ones[:number],
            samples=self._trues[:number],
            admitted=_EMPTY,
            preempted=_EMPTY,
            num_tokens=number,
        )
        self.next_step += 1
        return plan

    def _find_places(self, running: Int32Array) -> None:
        """Find slots, in the type that numpy indexes with at a third of the price, rows and epochs of those that run.

        Rows and epochs change only with who runs, which is another array then.
        """
        table, places = self._state.table, running.astype(np.intp)
        self._running, self._places = running, places
        self._rows, self._epochs = table.row[places].astype(np.int32), table.epoch[places]

    def _extend(
        self, view: SchedulerView, decodes: Int32Array, token_budget: int, proposal: Proposal
    ) -> tuple[Int32Array, Int32Array]:
        """Return decodes and their token counts, with as many to verify as every other token left room for; nothing is preempted."""
        table, size = self._state.table, self._state.block_size
        by_slot = np.zeros(table.capacity, np.int32)
        by_slot[proposal.slots] = proposal.tokens.num_drafts
        wanted = by_slot[decodes]
        extra = np.clip(token_budget - (np.cumsum(wanted) - wanted), 0, wanted)
        room = table.num_blocks[decodes] * size - table.num_computed_tokens[decodes] - 1  # in blocks it has
        missing = -(-np.maximum(extra - room, 0) // size)
        affordable = np.cumsum(missing) <= self._blocks.num_available
        extra = np.where(affordable, extra, np.minimum(extra, room))
        return self._allocate(view, decodes, (1 + extra).astype(np.int32))

    def _take_back(self) -> None:
        """Free the blocks after the known tokens, unless tokens in flight use them: those that were verified and did not stand got them."""
        state, table, size = self._state, self._state.table, self._state.block_size
        running = state.running[table.num_tokens[state.running] == table.num_known_tokens[state.running]]
        spare = table.num_blocks[running] > -(-table.num_tokens[running] // size)
        for slot in running[spare].tolist():
            kept = -(-int(table.num_tokens[slot]) // size)
            state.blocks.release(state.blocks_of(table.sequence(slot))[kept:].copy(), now_s=state.clock.now_s())
            table.num_blocks[slot] = kept

    def _allocate(self, view: SchedulerView, decodes: Int32Array, lengths: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Give every decode the blocks for its new tokens; preempt until the rest fit."""
        state, table = self._state, self._state.table
        size = state.block_size
        ends = table.num_computed_tokens[decodes] + lengths
        missing = np.maximum(-(-ends // size) - table.num_blocks[decodes], 0)  # a chunk may end before its blocks do
        needed = int(missing.sum())
        if not needed:
            return decodes, lengths
        while needed > self._blocks.num_available:
            if not self._make_room(view, num_needed=needed):
                break
            stays = np.isin(decodes, state.running)
            decodes, lengths, missing = decodes[stays], lengths[stays], missing[stays]
            needed = int(missing.sum())
        if not needed:
            return decodes, lengths
        growing = missing > 0
        slots, extra = decodes[growing], missing[growing]
        blocks = self._blocks.allocate(needed)
        rows, firsts = table.row[slots], table.num_blocks[slots]
        if needed == len(slots):
            state.rows.write_blocks(rows.astype(np.int32), firsts.astype(np.int32), blocks)
        else:
            offsets = np.arange(needed) - np.repeat(np.cumsum(extra) - extra, extra)
            columns = np.repeat(firsts, extra) + offsets
            state.rows.write_blocks(np.repeat(rows, extra).astype(np.int32), columns.astype(np.int32), blocks)
        table.num_blocks[slots] += extra
        return decodes, lengths

    def _make_room(self, view: SchedulerView, *, num_needed: int = 0, may_fail: bool = True) -> bool:
        """Free blocks: loaded ones that wait, then a victim's, or where that may be one that has no room alone; False if there were none."""
        state, table = self._state, self._state.table
        if self.admission.reclaim():
            return True
        candidates = self._preemptible()
        if may_fail and candidates.size <= 1 and not state.num_kept_blocks:
            for slot in candidates.tolist():
                error = f"the KV cache of {self._blocks.num_blocks} blocks has no room for this sequence alone"
                self.failed.append(state.finish(table.sequence(slot), FinishReason.ERROR, error=error))
            return bool(candidates.size)
        often = table.num_preemptions[candidates] >= self._max_preemptions
        if often.any() and not often.all():
            candidates = candidates[~often]
        victim = self._policy.victim(view, candidates=read_only(candidates))
        state.facts.append(("preempt", victim, -1, num_needed, self._blocks.num_available))
        state.preempt(table.sequence(victim))
        self._preempted.append(victim)
        return True

    def _preemptible(self) -> Int32Array:
        """Return the running sequences whose blocks can be given to others that run."""
        return self._state.running

    # --------------------------------------------------------------------------------------------- prefills

    def _continue_prefills(
        self,
        view: SchedulerView,
        prefills: Int32Array,
        token_budget: int,
        slots: list[Int32Array],
        counts: list[Int32Array],
    ) -> None:
        """Append a chunk of each unfinished prefill that was not preempted, until the budget is used."""
        table = self._state.table
        for slot in prefills.tolist():
            if table.row[slot] < 0 or token_budget <= 0:
                continue
            remaining = int(table.num_tokens[slot] - table.num_computed_tokens[slot])
            chunk = self._policy.chunk(view, slot=slot, num_remaining=remaining, token_budget=token_budget)
            if chunk:
                token_budget -= chunk
                slots.append(np.array([slot], np.int32))
                counts.append(np.array([chunk], np.int32))

    def _plan_alone(self, slot: int) -> Plan | None:
        """Plan one suspect of a failed step alone, so that only the one at fault ends with the error."""
        state, table = self._state, self._state.table
        state.facts.append(("alone", slot))
        if table.sequence(slot).state is SequenceState.ASIDE:
            return self._finish_plan(_EMPTY, _EMPTY)  # its stage has not resumed it yet
        if table.row[slot] < 0:
            slots, counts = self.admission.admit_alone(slot, token_budget=self._budget)
            while (
                self.admission.lacks_blocks
                and state.running.size
                and self._make_room(self.views.view(), may_fail=False)
            ):
                slots, counts = self.admission.admit_alone(slot, token_budget=self._budget)
            return self._finish_plan(slots, counts)
        is_in_flight = self._runnable is not None and table.num_tokens[slot] > table.num_known_tokens[slot]
        if is_in_flight or table.num_tokens[slot] >= table.max_total_tokens[slot]:
            return None
        slots = np.array([slot], np.int32)
        remaining = int(table.num_tokens[slot] - table.num_computed_tokens[slot])
        lengths = np.array([min(remaining, self._budget)], np.int32)
        slots, lengths = self._allocate(self.views.view(), slots, lengths)
        return self._finish_plan(slots, lengths)

    # ------------------------------------------------------------------------------------------------- plan

    def _finish_plan(self, slots: Int32Array, counts: Int32Array, proposal: Proposal | None = None) -> Plan | None:
        """Count the scheduled tokens as computed and wrap everything up."""
        table = self._state.table
        if not slots.size and not self._preempted and not self.wants_step():
            return None
        starts = table.num_computed_tokens[slots]
        ends = starts + counts
        known = table.num_tokens[slots]
        to_verify = None if proposal is None else self._to_verify(slots, counts, proposal)
        self.verifies = to_verify is not None
        sure = ends if to_verify is None else ends - to_verify.num_drafts  # these count as computed when they stood
        samples = sure == known
        if (sure > known).any():
            raise InternalError(f"plan {self.next_step} schedules tokens beyond the known ones: {slots[ends > known]}")
        if table.was_preempted:
            self._count_recomputed(slots, starts, ends)
        table.num_computed_tokens[slots] = sure
        table.num_tokens[slots] = known + samples
        plan = Plan(
            step=self.next_step,
            slots=slots,
            rows=table.row[slots].astype(np.int32),
            epochs=table.epoch[slots],
            starts=starts.astype(np.int32),
            num_scheduled=counts,
            samples=samples,
            drafts=to_verify,
            admitted=np.array(self.admission.admitted, np.int32),
            preempted=np.array(self._preempted, np.int32),
        )
        self.next_step += 1
        return plan

    def _to_verify(self, slots: Int32Array, counts: Int32Array, proposal: Proposal) -> Drafts | None:
        """Return the tokens to verify in plan order, without those that were left out."""
        place = {slot: i for i, slot in enumerate(proposal.slots.tolist())}
        picks = np.array([place.get(slot, -1) for slot in slots.tolist()], np.int32)
        kept = np.where(picks >= 0, counts - 1, 0).astype(np.int32)
        return proposal.tokens.take(picks, kept) if kept.any() else None

    def _count_recomputed(self, slots: Int32Array, starts: Int64Array, ends: Int64Array) -> None:
        again = np.minimum(self._state.table.high_water[slots], ends) - starts
        self.num_recomputed_tokens = int(again[again > 0].sum())


def _constant(number: int, kind: type[np.generic]) -> Any:
    """Return ones that cannot be changed: plans share them."""
    ones = np.ones(number, kind)
    ones.flags.writeable = False
    return ones


class Preemptor(Restorable):
    """Preempts running sequences for a waiting one, in the policy's order: as many as it takes, or none.

    A sequence that waited too long does not come first here: it gets what is free, but its wait gives it no claim on what others hold.
    Room is kept for the sequence for which it was made until that is admitted; otherwise, with a queue full of sequences that waited too
    long, a request could preempt one after the other and get nothing.

    Args:
        state: The engine's state; changed by :meth:`preempt`.
        policy: The guarded scheduling policy.
        admission: Tells what a waiting sequence lacks.
        max_preemptions: Sequences preempted as often are not preempted again, and neither are those that were preempted and have waited too
            long in all: they would start anew each time.
    """

    restored = ("_made_for",)

    def __init__(
        self, state: EngineState, policy: GuardedScheduling, admission: Admission, *, max_preemptions: int
    ) -> None:
        self._state = state
        self._policy = policy
        self._admission = admission
        self._max_preemptions = max_preemptions
        self._made_for: dict[int, int] = {}  # slots and epochs

    @property
    def has_room(self) -> tuple[int, ...]:
        """Waiting slots for which room was made, the first first."""
        return tuple(self._made_for)

    def preempt(self, view: SchedulerView, order: Int32Array) -> list[int]:
        """Return the slots that were preempted for the first of ``order`` for which that is enough.

        Args:
            view: The state.
            order: Waiting slots, most urgent first.
        """
        state, table = self._state, self._state.table
        self._made_for = {
            slot: epoch
            for slot, epoch in self._made_for.items()
            if table.epoch[slot] == epoch and state.is_waiting(slot)
        }
        for slot in dict.fromkeys([*self._made_for, *order[:_MAX_TRIES].tolist()]):
            # Nothing is to be gained for one whose last token is in flight.
            if table.num_tokens[slot] != table.num_known_tokens[slot]:
                continue
            victims = self._chosen(view, slot)
            for victim in victims:
                state.facts.append(("preempt", victim, slot))
                state.preempt(table.sequence(victim))
            if victims:
                self._made_for.setdefault(slot, int(table.epoch[slot]))
                return victims
        return []

    def _chosen(self, view: SchedulerView, slot: int) -> list[int]:
        """Return the sequences to preempt for one waiting sequence; none unless that is enough for it."""
        state, table = self._state, self._state.table
        rows, blocks = self._admission.lacks(slot)
        running = self._candidates()
        times = table.num_preemptions[running]
        is_spared = (times >= self._max_preemptions) | (
            (times > 0) & (table.waited_s[running] > self._admission.max_wait_s)
        )
        candidates = running[~is_spared]
        chosen: list[int] = []
        while rows > 0 or blocks > 0:
            if not candidates.size:
                return []
            victim = self._policy.preempt_for(view, slot=slot, candidates=read_only(candidates))
            if victim < 0:
                return []
            chosen.append(victim)
            candidates = candidates[candidates != victim]
            rows -= 1
            held = state.blocks_of(table.sequence(victim))
            blocks -= int(np.count_nonzero(state.blocks.ref_counts[held] == 1))  # what it shares is not freed
        return chosen

    def _candidates(self) -> Int32Array:
        """Return the running sequences whose rows and blocks the waiting one can get."""
        return self._state.running
