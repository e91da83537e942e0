"""From waiting to running: prefix hits, claims of stages, blocks and a row.

A sequence is admitted only if all its known tokens get a block, so that a prefill once begun never lacks one.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.sequences import Claim, Sequence, SequenceTable, SlotQueue, When
from trencadis.engine.state import EngineState
from trencadis.interfaces import SchedulerView
from trencadis.interfaces.restorable import Restorable
from trencadis.records import BoolArray, FloatArray, Int32Array

__all__ = ["Admission", "CachedOrder", "HeldBack", "Outcome", "came_before"]

_NONE = np.empty(0, np.int32)


class Outcome(enum.Enum):
    """Result of trying to admit a sequence."""

    ADMITTED = "admitted"
    SKIPPED = "skipped"  # this one cannot run now; try the next
    FULL = "full"  # no row or no blocks: no later sequence may overtake


class Admission:
    """Admits waiting sequences in the policy's order.

    Args:
        state: The engine's state.
        policy: The guarded scheduling policy.
        max_wait_s: Sequences that waited longer, since they ran last, come first, those that wait longest first of all.
        watermark_ratio: Share of all blocks kept free for decodes while others run. Source: vLLM's first scheduler.

    Attributes:
        cached_order: The policy's order.
        has_outcome: There was something to admit since :meth:`begin`.
        max_wait_s: The argument.
        lacks_blocks: Who was to be admitted alone last was not, for want of blocks and nothing else.
        claims: Called, in order, with a waiting sequence; see ``Stage.claim``.
    """

    lacks_blocks: bool = False
    _lacking = "blocks"  # what there was not enough of for the last sequence that could not be admitted

    def __init__(
        self, state: EngineState, policy: GuardedScheduling, *, max_wait_s: float, watermark_ratio: float = 0.01
    ) -> None:
        self._state = state
        self._policy = policy
        self.cached_order = CachedOrder(state.waiting, policy, is_waiting=state.is_waiting)
        self.claims: tuple[Callable[..., Claim | None], ...] = ()
        self.max_wait_s = max_wait_s
        self._blocks = state.blocks  # from which blocks are taken
        self._watermark = int(state.blocks.num_blocks * watermark_ratio)
        self._watermark_used = 0
        self.admitted: list[int] = []
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_pending = 0
        self._held_back = HeldBack(state.table)
        self.has_outcome = False
        self._chunk = 0
        self._short = (0, 0)

    def begin(self) -> None:
        """Forget the last plan's admissions."""
        self.has_outcome = False
        self.admitted = []
        self.num_prompt_tokens = self.num_cached_tokens = self.num_pending = 0

    def order(self, view: SchedulerView) -> Int32Array:
        """Return the waiting slots in the order in which to admit; a copy, since admissions shift the queue."""
        return self.ranked_by_age(view, self.cached_order.order(view))

    def ranked_by_age(self, view: SchedulerView, order: Int32Array, *, first: tuple[int, ...] = ()) -> Int32Array:
        """Return the order in which to admit, from the policy's.

        Args:
            view: The state.
            order: All waiting slots.
            first: Some of them, for which room was made: they come before those that waited too long.
        """
        order = self._aged(view, order).copy()
        if first:
            order = np.concatenate([np.array(first, np.int32), order[~np.isin(order, first)]])
        self._state.facts.append(("order", order))
        return order

    def lacks(self, slot: int) -> tuple[int, int]:
        """Return how many rows and blocks a waiting sequence lacks to be admitted now; 0, 0 if it could be. Pure."""
        state = self._state
        sequence = state.table.sequence(slot)
        rows = max(0, 1 - self._num_free_rows)
        if sequence.claim is not None and sequence.claim.blocks is not None:
            return rows, 0  # it holds its blocks already
        hit = state.local_hit(sequence, self._blocks)
        num_new = -(-len(sequence.tokens) // state.block_size) - len(hit)
        reserve = self._watermark if state.running.size else 0
        return rows, max(0, num_new + self._blocks.num_unreferenced(hit) + reserve - self._blocks.num_available)

    @property
    def _num_free_rows(self) -> int:
        """Rows that can be taken."""
        return self._state.rows.num_free

    def admit(
        self, view: SchedulerView, *, token_budget: int, order: Int32Array | None = None
    ) -> tuple[Int32Array, Int32Array]:
        """Admit while tokens, rows and blocks last; returns slots and their first chunks.

        Args:
            view: The state.
            token_budget: Tokens left in this step.
            order: Who may be admitted, in order; None: all that wait, as the policy says.
        """
        state = self._state
        self.has_outcome = True
        chunks: list[int] = []
        if not state.rows.num_free:
            state.facts.append(("stop", "rows"))
            return np.empty(0, np.int32), np.empty(0, np.int32)
        order = self.order(view) if order is None else order
        if state.running.size:
            order, held_back = self._held_back.left_out(order)
            if held_back.size:
                self.num_pending += len(held_back)
                state.facts.append(("held back", held_back))
        for slot in map(int, order):
            if token_budget <= 0 or not state.rows.num_free:
                state.facts.append(("stop", "tokens" if token_budget <= 0 else "rows", slot))
                break
            outcome = self._try(state.table.sequence(slot), view, token_budget)
            while outcome is Outcome.FULL and not state.running.size and self.reclaim():
                # Nothing runs that could free blocks: those that wait or load must not keep them all.
                outcome = self._try(state.table.sequence(slot), view, token_budget)
            if outcome is Outcome.FULL:
                state.facts.append(("stop", self._lacking, slot, *self._short))
                break
            if outcome is Outcome.ADMITTED:
                token_budget -= self._chunk
                chunks.append(self._chunk)
        return np.array(self.admitted, np.int32), np.array(chunks, np.int32)

    def admit_alone(self, slot: int, *, token_budget: int) -> tuple[Int32Array, Int32Array]:
        """Admit one sequence without asking the policy or the stages, if it can be admitted; else :attr:`lacks_blocks` says why not."""
        self.has_outcome, self.lacks_blocks = True, False
        if not self._state.rows.num_free:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        outcome = self._try(self._state.table.sequence(slot), None, token_budget)
        self.lacks_blocks = outcome is Outcome.FULL
        count = [self._chunk] if outcome is Outcome.ADMITTED else []
        return np.array(self.admitted, np.int32), np.array(count, np.int32)

    def reclaim(self) -> bool:
        """Take back blocks that are kept for sequences which do not run: the youngest first. False if there are none."""
        state = self._state
        # Who waited aside is at the front of the queue: the others may be a hundred thousand.
        for slot in state.waiting.slots[: state.waiting.num_front][::-1].tolist():
            sequence = state.table.sequence(slot)
            if sequence.claim is not None and sequence.claim.blocks is not None:
                state.drop_claim(sequence)
                return True
        for slot in reversed(state.aside):
            sequence = state.table.sequence(slot)
            if sequence.claim is not None:
                available = state.blocks.num_available
                state.drop_claim(sequence)
                state.resume(sequence, front=True)
                return state.blocks.num_available > available
        return False

    def _aged(self, view: SchedulerView, order: Int32Array) -> Int32Array:
        """Move sequences that have waited too long to the front, those that wait longest first."""
        old = came_before(self._state.waiting, view.waiting_since_s, view.now_s - self.max_wait_s)
        if not old.size or len(old) == len(order):
            return old if old.size else order
        is_old = np.zeros(len(view.arrival_s), np.bool_)
        is_old[old] = True
        return np.concatenate([old, order[~is_old[order]]])

    def _try(self, sequence: Sequence, view: SchedulerView | None, token_budget: int) -> Outcome:
        state, table, slot = self._state, self._state.table, sequence.slot
        num_tokens = int(table.num_tokens[slot])
        if num_tokens > table.num_known_tokens[slot]:
            state.facts.append(("skip", slot, "its last token is still in flight"))
            return Outcome.SKIPPED
        claim = sequence.claim
        held = claim.blocks if claim is not None else None
        hit = state.local_hit(sequence, self._blocks) if held is None else held.tolist()
        if claim is None and view is not None and self.claims:
            claim = self._ask(sequence, num_found=len(hit))
            if claim is not None and claim.when in (When.PENDING, When.GONE):
                return Outcome.SKIPPED
            num_tokens = int(table.num_tokens[slot])  # a claim may bring one
        num_new = -(-num_tokens // state.block_size) - len(hit)
        if num_new and not self._fits(num_new, hit if held is None else []):
            self._put_back(sequence, claim)
            return Outcome.FULL
        if claim is not None and claim.when is When.AFTER_LOAD:
            self._load(sequence, claim, hit, num_new)
            return Outcome.SKIPPED
        num_computed = len(hit) * state.block_size if held is None else 0
        if claim is not None:
            num_computed = max(num_computed, claim.num_tokens)
        remaining = num_tokens - num_computed
        self._chunk = (
            min(remaining, token_budget)
            if view is None
            else self._policy.chunk(view, slot=slot, num_remaining=remaining, token_budget=token_budget)
        )
        if not self._chunk:
            self._put_back(sequence, claim)
            state.facts.append(("skip", slot, "the policy gave its first part no tokens"))
            return Outcome.SKIPPED
        if not self._take(sequence, claim, hit, num_new, num_computed):
            state.facts.append(("skip", slot, "its KV load could not be begun"))
            return Outcome.SKIPPED
        return Outcome.ADMITTED

    def _take(self, sequence: Sequence, claim: Claim | None, hit: list[int], num_new: int, num_computed: int) -> bool:
        """Admit a sequence; False if what it claims could not be begun.

        Args:
            sequence: It waits.
            claim: KV of its first tokens, or None.
            hit: Blocks that hold its beginning: of the prefix cache, or those that the claim holds.
            num_new: Blocks that it takes besides.
            num_computed: First tokens whose KV is in them, or will be when a layer is read.
        """
        state, num_found = self._state, len(hit)
        blocks = self._with_new(sequence, hit, num_new, acquires=claim is None or claim.blocks is None)
        if claim is not None:
            if not claim.begin(sequence, blocks, num_found=num_found):
                if claim is sequence.claim:
                    state.drop_claim(sequence)  # with the blocks that it holds
                    blocks = blocks[num_found:] if claim.blocks is not None else blocks
                state.blocks.release(blocks, now_s=state.clock.now_s())
                return False
            sequence.is_provisional = claim.is_provisional
        counts_all = claim is not None and claim.counts_as_cached
        num_cached = num_computed if counts_all else num_found * state.block_size
        if sequence.num_cached_tokens < 0:
            self._count_hit(sequence, num_cached)
        state.admit(sequence, blocks=blocks, num_computed=num_computed, num_cached=num_cached)
        self.admitted.append(sequence.slot)
        return True

    def _load(self, sequence: Sequence, claim: Claim, hit: list[int], num_new: int) -> None:
        """Set a sequence aside until it is loaded. It holds blocks for all its tokens, so that it can run at once then."""
        state = self._state
        state.set_aside(sequence, claim.reason, is_queued=False)
        blocks = self._with_new(sequence, hit, num_new, acquires=True)
        sequence.claim = claim
        if not claim.begin(sequence, blocks, num_found=len(hit)):
            sequence.claim = None
            state.blocks.release(blocks, now_s=state.clock.now_s())
            state.resume(sequence, front=True)

    def _with_new(self, sequence: Sequence, hit: list[int], num_new: int, *, acquires: bool) -> Int32Array:
        """Return blocks for all tokens of a sequence: found ones, of which a reference is taken unless they are held, and new ones."""
        state = self._state
        if hit and acquires:
            state.blocks.acquire(hit, now_s=state.clock.now_s(), salt=sequence.request.cache_salt)
        blocks: Int32Array = np.concatenate([np.array(hit, np.int32), self._blocks.allocate(num_new)])
        return blocks

    def _count_hit(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the prompt of a sequence that runs for the first time, and how much of that was cached before it came.

        What another engine has just computed for it is no hit, wherever it is found: clients pay less for hits.
        """
        most = num_prompt = len(sequence.request.prompt_token_ids)  # with output of another engine, more is found
        if sequence.max_cached_tokens >= 0:
            most = min(most, sequence.max_cached_tokens)
        sequence.num_cached_tokens = min(num_tokens, most)
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += sequence.num_cached_tokens

    def _ask(self, sequence: Sequence, *, num_found: int) -> Claim | None:
        """Return what the first stage claims that has something beyond the local hit, or that it does not know yet."""
        for ask in self.claims:
            claim = ask(sequence, num_found=num_found)
            if claim is None:
                continue
            if claim.when is When.PENDING:
                self.num_pending += 1
                self._held_back.add(sequence.slot)
                self._state.facts.append(("skip", sequence.slot, claim.reason))
            return claim
        return None

    def _put_back(self, sequence: Sequence, claim: Claim | None) -> None:
        """Have a sequence's claim asked for again when there is room; one that is kept with the sequence stays."""
        if claim is not None and claim is not sequence.claim:
            claim.unused()

    def _fits(self, num_new: int, hit: list[int]) -> bool:
        state = self._state
        reserve = self._watermark if state.running.size else 0
        needed, available = num_new + self._blocks.num_unreferenced(hit) + reserve, self._blocks.num_available
        self._short = needed, available
        return needed <= available


class HeldBack:
    """Sequences that a stage holds back by a pending claim, those asked for longest ago first.

    While others run, only so many are asked for again in a plan: the cost of a step does not grow with how many wait for a stage.

    Args:
        table: The live sequences.
        num_asked: Sequences that are asked for again in a plan.
    """

    def __init__(self, table: SequenceTable, num_asked: int = 256) -> None:
        self._table = table
        self._num_asked = num_asked
        self._asked: dict[int, int] = {}  # epoch by slot: another one, and it ran or left since
        self._epochs = np.zeros(0, np.int64)  # the same as an array; epochs begin at 1

    def add(self, slot: int) -> None:
        """Note that a sequence is held back."""
        if slot >= len(self._epochs):
            self._epochs = np.append(self._epochs, np.zeros(self._table.capacity - len(self._epochs), np.int64))
        self._asked.pop(slot, None)
        self._asked[slot] = self._epochs[slot] = int(self._table.epoch[slot])

    def left_out(self, order: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Return an order without those that are not asked for in this plan, and these. O(waiting), in NumPy.

        Args:
            order: Waiting slots, int32 ``[n]``.
        """
        if len(self._asked) <= self._num_asked:
            return order, _NONE
        epoch, due, gone = self._table.epoch, list[int](), list[int]()
        for slot, known in self._asked.items():
            (due if epoch[slot] == known else gone).append(slot)
            if len(due) == self._num_asked:
                break
        for slot in gone:
            del self._asked[slot]
        self._epochs[due] = 0
        known_slots = order < len(self._epochs)
        is_held = np.zeros(len(order), np.bool_)
        is_held[known_slots] = self._epochs[order[known_slots]] == epoch[order[known_slots]]
        self._epochs[due] = epoch[due]
        return order[~is_held], order[is_held]


class CachedOrder(Restorable):
    """The policy's order of the waiting sequences; asked for in every step, or, of ``n``, in every ``n // per_step``-th.

    Between, the order stands: those that left are left out, those that came since come last, those put back to the front of
    the queue come first. So the cost of sorting for a step does not grow with the queue; in exchange a newcomer to a
    queue of 100,000 finds its place some 24 steps late.

    Args:
        queue: The waiting sequences.
        policy: The guarded scheduling policy.
        is_waiting: Returns whether the sequence of a slot waits.
        per_step: Sequences to sort for in a step, on average.
    """

    restored = ("_order", "_known", "_num_appended", "_num_removed", "_steps_left")

    def __init__(
        self, queue: SlotQueue, policy: GuardedScheduling, *, is_waiting: Callable[[int], bool], per_step: int = 4096
    ) -> None:
        self._queue = queue
        self._policy = policy
        self._is_waiting = is_waiting
        self._per_step = per_step
        self._order: Int32Array = np.empty(0, np.int32)
        self._known: BoolArray = np.zeros(0, np.bool_)  # by slot: who is in the order
        self._sorted_by: object = None
        self._num_appended = self._num_removed = 0
        self._steps_left = 0

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Take the order of another engine whose policy is the same."""
        super().restore_state(values)
        self._sorted_by = self._policy.strategy

    def order(self, view: SchedulerView) -> Int32Array:
        """Return a permutation of ``view.waiting``; not to be changed."""
        num_steps = len(view.waiting) // self._per_step
        if self._steps_left and num_steps > 1 and self._sorted_by is self._policy.strategy:
            self._steps_left -= 1
            self._follow(view)
            return self._order
        order = self._policy.order(view)
        # One who takes the queue as it is may be asked in every step.
        self._steps_left = 0 if order is view.waiting else max(num_steps - 1, 0)
        if self._steps_left:
            self._keep(order, view)
        return order

    def _keep(self, order: Int32Array, view: SchedulerView) -> None:
        self._order = order.copy()
        self._sorted_by = self._policy.strategy  # after the call, which may have put a fallback in its place
        self._known = np.zeros(len(view.arrival_s), np.bool_)
        self._known[order] = True
        self._num_appended, self._num_removed = self._queue.num_appended, self._queue.num_removed

    def _follow(self, view: SchedulerView) -> None:
        """Bring the order up to date with the queue: O(changes) if those that left were the first, as is usual."""
        queue, waiting = self._queue, view.waiting
        num_gone, num_new = queue.num_removed - self._num_removed, queue.num_appended - self._num_appended
        self._num_appended, self._num_removed = queue.num_appended, queue.num_removed
        if len(self._known) < len(view.arrival_s):
            self._known = np.append(self._known, np.zeros(len(view.arrival_s) - len(self._known), np.bool_))
        num_first = 0
        while num_first < min(num_gone, len(self._order)) and not self._is_waiting(int(self._order[num_first])):
            num_first += 1
        self._known[self._order[:num_first]] = False
        self._order = self._order[num_first:]
        if num_first < num_gone:
            self._leave_out(waiting)
        front, tail = waiting[: queue.num_front], waiting[max(queue.num_front, len(waiting) - num_new) :]
        front, tail = front[~self._known[front]], tail[~self._known[tail]]
        if front.size or tail.size:
            self._known[front] = self._known[tail] = True
            self._order = np.concatenate([front, self._order, tail])

    def _leave_out(self, waiting: Int32Array) -> None:
        """Leave out those that do not wait, wherever they are."""
        waits = np.zeros(len(self._known), np.bool_)
        waits[waiting] = True
        stays = waits[self._order]
        self._known[self._order[~stays]] = False
        self._order = self._order[stays]


def came_before(waiting: SlotQueue, since_s: FloatArray, before_s: float) -> Int32Array:
    """Return the slots that have waited since before a time, those that wait longest first. Pure.

    O(log n) for each that was put back to the front of the queue, and a copy: the others are in that order already.

    Args:
        waiting: The queue.
        since_s: When each slot began to wait.
        before_s: Engine clock.
    """
    slots, num_front = waiting.slots, waiting.num_front
    front, tail = slots[:num_front], slots[num_front:]
    old = front[since_s[front] < before_s]
    num_old = bisect_left(tail, before_s, key=since_s.__getitem__)
    if not old.size:
        return tail[:num_old]
    old = old[np.argsort(since_s[old], kind="stable")]
    places = [bisect_left(tail, time_s, key=since_s.__getitem__) for time_s in since_s[old].tolist()]
    return np.insert(tail[:num_old], places, old)
