"""Between the engine and speculation: who is drafted for, how much, and what became of it.

    running decodes ─ may be drafted for ─▶ draft length: how many each ─▶ speculator: drafts ─ checked ─▶ scheduler

Text never depends on drafts: a component that fails is replaced by its fallback, or speculation goes off and requests go on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from trencadis.engine.guard import Guarded, TooSlowError
from trencadis.engine.sampling.guarded import GuardedAcceptance
from trencadis.engine.state import EngineState
from trencadis.errors import ContractError, StepFailedError
from trencadis.faults import CallMeter, Fallback, FaultLog, reraise_interrupt, shown
from trencadis.interfaces import (
    AcceptanceRule,
    DraftLength,
    DraftView,
    HeadBatch,
    HeadGuesses,
    HeadNodes,
    LengthView,
    Speculator,
    SupportsHead,
    VerifiedStep,
)
from trencadis.interfaces.laws import legal
from trencadis.records import BoolArray, BucketLimits, Drafts, Int32Array, Plan, SamplingParams, StepOutput, read_only

__all__ = ["Drafting", "GuardedSpeculator", "Speculation", "check_numbers"]

_EMPTY = np.empty(0, np.int32)

_LINEAR, _BRANCHING = 1, 2


@attrs.frozen(kw_only=True)
class Speculation:
    """The components that speculation is made of.

    Attributes:
        speculator: Who drafts.
        length: How much.
        acceptance: Which drafts stand.
        supports_drafts: ``supports_drafts(params, branching)``: what the sampler says of a sequence.
        labels: Names of speculator and draft length in messages; empty: those of their classes.
        names: Of the speculator and of its fallback, as the configuration has them.
        make_fallbacks: Make what takes over from speculator and draft length; None: speculation goes off.
    """

    speculator: Speculator
    length: DraftLength
    acceptance: AcceptanceRule
    supports_drafts: Callable[[SamplingParams, bool], bool] = lambda _, __: True
    labels: tuple[str, str] = ("", "")
    names: tuple[str, str] = ("", "")
    make_fallbacks: tuple[Callable[[], Speculator] | None, Callable[[], DraftLength] | None] = (None, None)


class Drafting:
    """Asks for drafts; a null object without speculation.

    Args:
        state: The engine's state, read only.
        speculation: Its components, or None.
        padded_tokens: Token positions of a decode pass, by sequences and tokens of each; None: their product.
        pads: Every sequence of a pass costs as many positions as the longest.
        vocab_size: Tokens that the model knows.
        head: Has the model's own head draft; None: there is none.
        meter_of: Returns what measures the calls of a component, by noun and label.

    Attributes:
        draft_s: Time that the drafts of the newest plan took, and the choice of their number, seconds.
        fault: Why speculation is off, in words; empty: it is not.
        is_on: Whether there are drafts, if not now, later; without, :meth:`propose` and :meth:`verified` need not be called.
        is_configured: Whether there were any.
    """

    def __init__(
        self,
        state: EngineState,
        speculation: Speculation | None = None,
        *,
        padded_tokens: Callable[[int, int], int] | None = None,
        pads: bool = False,
        vocab_size: int = 1 << 31,
        head: SupportsHead | None = None,
        meter_of: Callable[[str, str], CallMeter] = lambda _, label: CallMeter(label),
    ) -> None:
        self.draft_s = 0.0
        self.fault = ""
        self._num_offs = 0
        self._faults = FaultLog(logging.getLogger("trencadis.engine"))
        self._start_s = 0.0
        self._num_rests = 0
        self._rests = False
        self._standing: tuple[bytes, Int32Array] | None = (
            None  # residencies of sequences and their lengths; None: no drafts
        )
        self._told = (-1, 0.0)  # the last step that was verified, and when
        self._state = state
        self._padded_tokens = padded_tokens or (lambda num_sequences, query_len: num_sequences * query_len)
        self._pads = pads
        self._head = head
        self._shapes: dict[int, tuple[int, int]] = {}
        self.is_on = self.is_configured = speculation is not None
        if speculation is None:
            return
        drafter, length = speculation.speculator, speculation.length
        labels = [given or type(one).__name__ for given, one in zip(speculation.labels, (drafter, length), strict=True)]
        self._names = speculation.names
        self._supports_drafts = speculation.supports_drafts
        self._rule = speculation.acceptance if isinstance(speculation.acceptance, GuardedAcceptance) else None
        meters = [meter_of(noun, label) for noun, label in zip(("speculation", "draft_length"), labels, strict=True)]
        self._meter = meters[0]
        self._speculator = GuardedSpeculator(
            labels[0], drafter, speculation.make_fallbacks[0], vocab_size=vocab_size, meter=meters[0]
        )
        self._length: Guarded[DraftLength] = Guarded(
            DraftLength, labels[1], length, speculation.make_fallbacks[1], meter=meters[1], ends_if_slow=True
        )

    @property
    def drafter(self) -> str:
        """Name of the speculator that drafts now; empty: none does."""
        return self._names[self._speculator.is_replaced] if self.is_on and not self.fault else ""

    @property
    def num_quarantined(self) -> int:
        """Speculators and draft lengths that failed since the start."""
        if not self.is_configured:
            return 0
        return self._speculator.num_quarantined + self._length.num_quarantined + self._num_offs

    def allocate(self, limits: BucketLimits) -> None:
        """Tell the speculator the engine's sizes; what it raises ends the start."""
        if self.is_on:
            self._speculator.allocate(limits)

    def propose(self) -> tuple[Drafts | None, Int32Array]:
        """Return drafts for running decodes, and their slots."""
        self.draft_s = 0.0
        if not self.is_on or (self.fault and not self._is_rested()):
            return None, _EMPTY
        self._start_s = self._state.clock.source.now_s()
        self._rests = self._num_rests > 0
        if self._rests:
            self._num_rests -= 1
            if self._standing is None:
                return None, _EMPTY
        if self._rule is not None and self._rule.fault:
            self._switch_off(StepFailedError(self._rule.fault))
            return None, _EMPTY
        try:
            self._speculator.try_again()
            self._length.try_again()
            slots, most = self._asked()
            drafts = self._speculator.ask.propose(self._view(slots, most)) if slots.size else None
        except StepFailedError as error:
            self._switch_off(error)
            return None, _EMPTY
        self.draft_s = self._state.clock.source.now_s() - self._start_s
        return (None, _EMPTY) if drafts is None or not drafts.num_drafts.any() else (drafts, slots)

    def verified(self, plan: Plan, output: StepOutput) -> None:
        """Tell what was accepted."""
        if not self.is_on or not plan.num_sequences:
            return
        if plan.drafts is not None or not self._rests:
            self._tell(plan, output)
        self._told = plan.step, self._state.clock.source.now_s()

    def _tell(self, plan: Plan, output: StepOutput) -> None:
        num_drafts = np.zeros(plan.num_sequences, np.int32) if plan.drafts is None else plan.drafts.num_drafts
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

    def finished(self, slot: int, token_ids: Int32Array) -> None:
        """Tell that a sequence left."""
        if not self.is_on:
            return
        self._shapes.pop(slot, None)
        try:
            self._speculator.ask.on_finished(slot=slot, token_ids=token_ids)
            self._length.ask.on_finished(slot=slot)
        except StepFailedError as error:
            self._switch_off(error)

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


def check_numbers(label: str, speculator: Speculator) -> None:
    """Refuse a speculator whose numbers are none to reckon with: room is made by them.

    Args:
        label: Names it in messages.
        speculator: Any.

    Raises:
        ContractError: ``max_draft_tokens`` or ``kv_bytes_per_token`` is no whole number, or too small.
    """
    for name, least in (("max_draft_tokens", 1), ("kv_bytes_per_token", 0)):
        number = getattr(speculator, name)
        if type(number) is not int or number < least:
            raise ContractError(
                f"{label} has {name} = {shown(number)}, which must be a whole number from {least} on.",
                hint="Mend the speculator, or choose another in speculation.name.",
            )


class GuardedSpeculator(Guarded[Speculator]):
    """A speculator whose drafts are legal.

    Args:
        label: See :class:`Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`Guarded`.
        vocab_size: Of the model that is drafted for: the device looks up every draft.
        meter: See :class:`Guarded`.

    Attributes:
        drafts_trees: The chosen one may draft trees: no other may if it does not.

    Raises:
        ContractError: A number of the chosen one is none.
    """

    def __init__(
        self,
        label: str,
        strategy: Speculator,
        make_fallback: Callable[[], Speculator] | None = None,
        *,
        vocab_size: int = 1 << 31,
        meter: CallMeter | None = None,
    ) -> None:
        super().__init__(Speculator, label, strategy, make_fallback, meter=meter, ends_if_slow=True)
        check_numbers(label, strategy)
        self._vocab_size = vocab_size
        self.drafts_trees = strategy.drafts_trees
        self._most = self._most_now = strategy.max_draft_tokens
        self._kv_bytes = strategy.kv_bytes_per_token
        self._limits: BucketLimits | None = None

    @property
    def max_draft_tokens(self) -> int:
        """The most drafts of a sequence in a step; no more than those of the chosen speculator, which room was made for."""
        return self._most_now

    def allocate(self, limits: BucketLimits) -> None:
        """Tell the chosen speculator the engine's sizes; what it raises ends the start."""
        self._limits = limits
        self.strategy.allocate(limits)

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in place: it gets the sizes, and frees the device of its predecessor's."""
        broken = self.strategy
        super().quarantine(cause)
        with contextlib.suppress(Exception, SystemExit):  # it is broken already; the cause is logged
            broken.close()
        try:
            self._introduce(self.strategy)
        except BaseException as error:
            reraise_interrupt(error)
            self.quarantine(error)

    def _put_back(self, label: str, strategy: Speculator, fallback: Fallback[Speculator]) -> None:
        with contextlib.suppress(Exception, SystemExit):  # its successor needs the room, and nothing else of it
            self.strategy.close()
        super()._put_back(label, strategy, fallback)
        self._introduce(strategy)

    def _introduce(self, fallback: Speculator) -> None:
        check_numbers(self.label, fallback)
        if fallback.kv_bytes_per_token > self._kv_bytes:
            raise ContractError(
                f"it keeps {fallback.kv_bytes_per_token} bytes for each token, and room was made for {self._kv_bytes}"
            )
        self._most_now = min(self._most, fallback.max_draft_tokens)
        if self._limits is not None:
            fallback.allocate(self._limits)

    def _check_propose(self, drafts: Drafts, args: tuple[DraftView], _: Mapping[str, Any]) -> Drafts:
        """Return drafts of tokens that the model knows, linear ones where no trees were announced."""
        tokens = drafts.token_ids
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise ContractError(f"it drafted tokens {shown(tokens)}, the model knows 0 to {self._vocab_size - 1}")
        if drafts.parents is not None and not self.drafts_trees:
            (view,) = args
            legal(Speculator.propose, drafts, attrs.evolve(view, linear_only=np.ones(len(view.slots), np.bool_)))
        return drafts
