"""The stage of engines that speculate: who is drafted for, how much, and what became of it.

    running decodes ─ may be drafted for ─▶ draft length: how many each ─▶ speculator: drafts ─ checked ─▶ scheduler

Text never depends on drafts: a component that fails is replaced by its fallback, or speculation goes off and requests go on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

import attrs
import numpy as np

from trencadis.engine.guard import Guarded, TooSlowError
from trencadis.engine.stage import EngineKinds, EngineParts, Makings, Stage
from trencadis.engine.step import Proposal, SubmittedStep
from trencadis.errors import StepFailedError
from trencadis.faults import FaultLog
from trencadis.interfaces import (
    AllocationPlan,
    DraftLength,
    DraftView,
    HeadBatch,
    HeadGuesses,
    HeadNodes,
    LengthView,
    SupportsHead,
    VerifiedStep,
)
from trencadis.records import BoolArray, FinishedSequence, Int32Array, Plan, StepOutput, TokenDeltas, read_only
from trencadis_stages.speculation.components import components_of, head_of
from trencadis_stages.speculation.counts import draft_stats
from trencadis_stages.speculation.guarded_speculator import GuardedSpeculator

__all__ = ["Speculation"]

_EMPTY = np.empty(0, np.int32)

_LINEAR, _BRANCHING = 1, 2


class Speculation(Stage):
    """Has drafts made for each plan, and tells what became of them.

    Args:
        makings: The components of the three nouns, and what they have to go with.

    Attributes:
        draft_s: Time that the drafts of the newest plan took, and the choice of their number, seconds.
        fault: Why speculation is off, in words; empty: it is not.
        is_on: Whether there are drafts, if not now, later.
    """

    def __init__(self, makings: Makings) -> None:
        made = components_of(makings)
        drafter, length = made.speculator, made.length
        self.draft_s = 0.0
        self.fault = ""
        self.is_on = True
        self.answers = {"totals": lambda _: {**attrs.asdict(self._totals), "drafter": self.drafter}}
        self._num_offs = 0
        self._faults = FaultLog(logging.getLogger("trencadis.engine"))
        self._start_s = 0.0
        self._num_rests = 0
        self._rests = False
        # Epochs of the sequences and their lengths, while the draft length rests; None: no drafts.
        self._standing: tuple[bytes, Int32Array] | None = None
        self._told = (-1, 0.0)  # the last step that was verified, and when
        self._shapes: dict[int, tuple[int, int]] = {}
        self._pads = makings.executor.capabilities.layout == "padded"
        self._head = head_of(makings.executor)
        self._names, self._supports_drafts, self._rule = made.names, made.supports_drafts, made.acceptance
        self._meter = makings.meter("speculation", drafter.label)
        self._speculator = GuardedSpeculator(
            drafter.label,
            drafter.component,
            drafter.make_fallback,
            vocab_size=makings.model.vocab_size,
            meter=self._meter,
        )
        self._length: Guarded[DraftLength] = Guarded(
            DraftLength,
            length.label,
            length.component,
            length.make_fallback,
            meter=makings.meter("draft_length", length.label),
            ends_if_slow=True,
        )

    def compose(self, kinds: EngineKinds) -> EngineKinds:
        """Make room for drafts, ask for them before each plan, and have one step follow the other.

        Drafts are made from committed tokens only, so a step with drafts cannot be planned ahead of one with the same sequences.
        """
        return attrs.evolve(
            kinds,
            depth=1,
            num_to_verify=self._speculator.max_draft_tokens,
            kv_bytes_per_token=kinds.kv_bytes_per_token + self._speculator.strategy.kv_bytes_per_token,
            scheduler=functools.partial(kinds.scheduler, propose=self.propose),
        )

    def allocate(self, plan: AllocationPlan) -> AllocationPlan:
        """Tell the backend how many drafts there may be, and which stand."""
        return attrs.evolve(plan, max_draft_tokens=self._speculator.max_draft_tokens, acceptance=self._rule)

    def bind(self, engine: EngineParts) -> None:
        """Tell the speculator the engine's sizes; what it raises ends the start."""
        self._state, self._padded_tokens, self._totals = engine.state, engine.buckets.padded_tokens, engine.totals
        self._speculator.allocate(engine.limits)

    @property
    def drafter(self) -> str:
        """Name of the speculator that drafts now; empty: none does."""
        return self._names[self._speculator.is_replaced] if self.is_on and not self.fault else ""

    @property
    def num_quarantined(self) -> int:
        """Speculators and draft lengths that failed since the start."""
        return self._speculator.num_quarantined + self._length.num_quarantined + self._num_offs

    def propose(self) -> Proposal | None:
        """Return drafts for running decodes, before a plan is made."""
        self.draft_s = 0.0
        if not self.is_on or (self.fault and not self._is_rested()):
            return None
        self._start_s = self._state.clock.source.now_s()
        self._rests = self._num_rests > 0
        if self._rests:
            self._num_rests -= 1
            if self._standing is None:
                return None
        if self._rule.fault:
            self._switch_off(StepFailedError(self._rule.fault))
            return None
        try:
            self._speculator.try_again()
            self._length.try_again()
            slots, most = self._asked()
            drafts = self._speculator.ask.propose(self._view(slots, most)) if slots.size else None
        except StepFailedError as error:
            self._switch_off(error)
            return None
        self.draft_s = self._state.clock.source.now_s() - self._start_s
        return None if drafts is None or not drafts.num_drafts.any() else Proposal(slots, drafts)

    # ------------------------------------------------------------------------------------------------- moments

    def after_plan(self, step: SubmittedStep | None) -> None:
        """Note how long drafts took, and what failed."""
        if step is not None:
            step.stats.update(draft_s=self.draft_s, num_drafters_quarantined=self.num_quarantined)

    def received(self, step: SubmittedStep, output: StepOutput) -> None:
        """Tell what was accepted, unless the step does not count."""
        plan = step.plan
        if not self.is_on or not plan.num_sequences or step.is_dropped:
            return
        if plan.drafts is not None or not self._rests:
            self._tell(plan, output)
        self._told = plan.step, self._state.clock.source.now_s()

    def after_step(self, step: SubmittedStep | None, output: StepOutput | None, deltas: TokenDeltas) -> TokenDeltas:
        """Count drafts, and those of them that were emitted: of a run that ends its sequence none after the end."""
        if step is not None and output is not None and step.plan.drafts is not None:
            drafts = step.plan.drafts
            emitted = np.clip(np.minimum(step.num_kept, output.num_emitted - 1), 0, drafts.num_drafts)
            step.stats.update(draft_stats(drafts, emitted))
        return deltas

    def left(self, finished: FinishedSequence) -> None:
        """Tell that a sequence left."""
        if not self.is_on:
            return
        self._shapes.pop(finished.slot, None)
        try:
            self._speculator.ask.on_finished(slot=finished.slot, token_ids=finished.token_ids)
            self._length.ask.on_finished(slot=finished.slot)
        except StepFailedError as error:
            self._switch_off(error)

    def inspect(self) -> str:
        """Return why speculation is off; empty: it is not."""
        return self.fault

    def close(self) -> None:
        """Let the speculator free what it holds; what it raises ends here."""
        if not self.is_on:
            return
        try:
            self._speculator.strategy.close()
        except (Exception, SystemExit) as error:
            self._faults.say(
                f"{self._speculator.label}.close", f"{self._speculator.label} raised in close().", error=error
            )

    # ------------------------------------------------------------------------------------------------- innards

    def _tell(self, plan: Plan, output: StepOutput) -> None:
        num_drafts = plan.num_to_verify
        num_accepted = np.where(num_drafts > 0, np.maximum(output.num_emitted - 1, 0), 0).astype(np.int32)
        try:
            if plan.drafts is not None:
                self._speculator.ask.on_verified(
                    slots=read_only(plan.slots), num_drafts=num_drafts.copy(), num_accepted=num_accepted.copy()
                )
            step = None if self._rests else self._verified_step(plan, output, num_drafts, num_accepted)
            if step is not None:
                self._length.ask.on_verified(step)
        except StepFailedError as error:
            self._switch_off(error)

    def _is_rested(self) -> bool:
        """Return whether speculation, which was too slow, goes on again."""
        if not self._meter.is_due:
            return False
        self._meter.switch_on()
        self.fault = ""
        logging.getLogger("trencadis.engine").warning("%s is tried again.", self._speculator.label)
        return True

    def _switch_off(self, error: StepFailedError) -> None:
        """Go on without drafts: for a while if they took too long, else for good."""
        is_slow = isinstance(error.__cause__, TooSlowError)
        how_long = self._meter.switch_off(str(error), for_good=not is_slow)
        self.draft_s = 0.0
        self.fault = str(error)
        self._num_offs += 1
        self._faults.say(
            self._speculator.label,
            f"{error} Speculation goes off {how_long}; requests go on without drafts.",
            error=None if is_slow else error.__cause__,
            level=logging.ERROR,
        )
        if is_slow:
            return
        self.is_on = False
        self._shapes.clear()
        with contextlib.suppress(Exception, SystemExit):  # one failure is enough to report
            self._speculator.strategy.close()

    def _asked(self) -> tuple[Int32Array, Int32Array]:
        """Return the slots to draft for, and the most drafts of each, at least 1."""
        state, table = self._state, self._state.table
        running = state.running
        num_tokens = table.num_tokens[running]
        slots = running[
            (num_tokens - table.num_computed_tokens[running] == 1) & (num_tokens == table.num_known_tokens[running])
        ]
        if not slots.size:
            return _EMPTY, _EMPTY
        most = np.minimum(table.max_total_tokens[slots] - table.num_tokens[slots] - 1, self._allowed(slots))
        may = most > 0
        num_running, slots, most = len(slots), slots[may], most[may].astype(np.int32)
        if not slots.size:
            return _EMPTY, _EMPTY
        if self._rests and self._standing is not None and self._standing[0] == table.epoch[slots].tobytes():
            chosen = np.minimum(self._standing[1], most)
        else:
            chosen = self._choose(slots, most, num_running)
        wanted = chosen > 0
        return slots[wanted], chosen[wanted]

    def _choose(self, slots: Int32Array, most: Int32Array, num_running: int) -> Int32Array:
        """Return the lengths, and for how many steps they stand."""
        state, table = self._state, self._state.table
        self._rests = False
        view = LengthView(
            slots=read_only(slots),
            epochs=table.epoch[slots],
            max_draft_tokens=read_only(most),
            num_running=num_running,
            num_waiting=len(state.waiting),
            padded_tokens=self._padded_tokens,
            pads=self._pads,
        )
        chosen = self._length.ask.choose(view).astype(np.int32)
        self._num_rests = self._length.ask.rest()
        self._standing = (view.epochs.tobytes(), chosen) if chosen.any() else None
        return chosen

    def _allowed(self, slots: Int32Array) -> Int32Array:
        """Return what speculator, request and sampler allow each sequence."""
        most = self._speculator.max_draft_tokens
        return np.array([min(most, self._shape(slot)[0]) for slot in slots.tolist()], np.int32)

    def _shape(self, slot: int) -> tuple[int, int]:
        """Return a sequence's own limit and whether its drafts may branch; found once for each."""
        found = self._shapes.get(slot)
        if found is None:
            takes, params = self._supports_drafts, self._state.table.sequence(slot).request.params
            limit = 1 << 30 if params.max_draft_tokens is None else params.max_draft_tokens
            if limit and not takes(params, False):
                limit = 0
            branches = self._speculator.drafts_trees and limit > 0 and takes(params, True)
            found = self._shapes[slot] = limit, _BRANCHING if branches else _LINEAR
        return found

    def _view(self, slots: Int32Array, most: Int32Array) -> DraftView:
        state, table = self._state, self._state.table
        sequences = [table.sequence(slot) for slot in slots.tolist()]
        linear_only: BoolArray = np.array([self._shape(slot)[1] == _LINEAR for slot in slots.tolist()], np.bool_)
        return DraftView(
            slots=read_only(slots),
            epochs=table.epoch[slots],
            token_ids=tuple([read_only(state.known_tokens(sequence)) for sequence in sequences]),
            max_draft_tokens=read_only(most),
            requests=tuple(sequence.request for sequence in sequences),
            seeds=tuple(sequence.seed for sequence in sequences),
            linear_only=read_only(linear_only),
            head=None if self._head is None else functools.partial(self._ask_head, self._head, slots, most),
            rank=None if self._head is None else functools.partial(self._rank, self._head, slots),
        )

    def _ask_head(self, head: SupportsHead, slots: Int32Array, most: Int32Array, min_probability: float) -> Int32Array:
        """Return the drafts of the model's head for running sequences."""
        rows, newest = self._places(slots)
        return head.draft(HeadBatch(rows=rows, positions=newest, num_drafts=most, min_probability=min_probability))

    def _rank(self, head: SupportsHead, slots: Int32Array, **level: Any) -> HeadGuesses:
        """Return what the model's head ranks first after nodes of draft trees of running sequences."""
        rows, newest = self._places(slots)
        return head.rank(HeadNodes(rows=rows, positions=newest, **level))

    def _places(self, slots: Int32Array) -> tuple[Int32Array, Int32Array]:
        table = self._state.table
        return table.row[slots].astype(np.int32), (table.num_computed_tokens[slots] - 1).astype(np.int32)

    def _verified_step(
        self, plan: Plan, output: StepOutput, num_drafts: Int32Array, num_accepted: Int32Array
    ) -> VerifiedStep | None:
        """Return the values for the draft length; None: no sequence decoded."""
        decodes = plan.num_scheduled == 1 + num_drafts
        if not decodes.any():
            return None
        before, told_s = self._told
        follows = before == plan.step - 1 and not plan.admitted.size
        return VerifiedStep(
            slots=plan.slots[decodes],
            epochs=plan.epochs[decodes],
            num_drafts=num_drafts[decodes],
            num_accepted=num_accepted[decodes],
            num_tokens=output.num_padded_tokens,
            num_prefill_tokens=int(plan.num_scheduled[~decodes].sum()),
            draft_s=self.draft_s,
            step_s=self._state.clock.source.now_s() - (told_s if follows else self._start_s) - self.draft_s,
        )
