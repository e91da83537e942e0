"""What a finished step changes: tokens become known, sequences end, full blocks become findable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trencadis.engine.sequences import Sequence, SequenceState
from trencadis.records import (
    BoolArray,
    FinishedSequence,
    FinishReason,
    Int32Array,
    Int64Array,
    Plan,
    StepOutput,
    TokenDeltas,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from trencadis.engine.state import EngineState

__all__ = ["Committer", "StopCheck"]

_EMPTY = np.empty(0, np.int32)
# Of short arrays ``1 in mask.tobytes()`` takes a tenth of ``mask.any()``, and ``0 not in`` that of ``all()``.


class Committer:
    """Applies step outputs to the state of one engine.

    Args:
        state: The engine's state; changed by :meth:`commit`.

    Attributes:
        num_kept: Where the newest commit had verified tokens, those that it gave each sequence of its plan: none after an end.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._stop_check = StopCheck(state)
        self._registers = state.prefix_caching or bool(state.on_filled)
        self.num_kept = _EMPTY

    def commit(self, plan: Plan, output: StepOutput) -> TokenDeltas:
        """Apply the output of ``plan``; what no longer applies (aborted, finished one step ago) is dropped."""
        table = self._state.table
        self.num_kept = _EMPTY
        failed = self._end_failed(plan, output) if output.row_errors else []
        places = plan.slots.astype(np.intp)  # numpy indexes with its own type at a third of the price
        resident = table.epoch[places] == plan.epochs
        are_resident = 0 not in resident.tobytes()
        emits = resident & (output.num_emitted > 0)
        if plan.drafts is not None:
            emitting = places[emits]
            slots, counts, token_ids = self._keep_verified(plan, output, emits)
        elif 0 not in emits.tobytes():
            slots, token_ids = plan.slots, output.token_ids
            counts, emitting = output.num_emitted, places
        else:
            emitting = places[emits]
            slots, counts = plan.slots[emits], output.num_emitted[emits]
            token_ids = output.token_ids[np.repeat(emits, output.num_emitted)]
        self._append(emitting, counts, token_ids)
        if self._registers:
            self._register_blocks(plan, output, places, resident)
        finished = failed + self._finish_ended(emitting, counts, token_ids)
        if not are_resident:
            late = self._commit_late_tokens(plan, output, resident)
            resident = resident | np.isin(plan.slots, [slot for slot, _, _ in late])  # what else the step has for them
            finished += [end for _, _, end in late if end is not None]
            slots = np.concatenate([slots, np.array([slot for slot, _, _ in late], np.int32)])
            counts = np.concatenate([counts, np.array([len(run) for _, run, _ in late], np.int32)])
            token_ids = np.concatenate([token_ids, *(run for _, run, _ in late)])
        return TokenDeltas(
            slots=slots,
            num_tokens=counts,
            token_ids=token_ids,
            finished=tuple(finished),
            logprobs=self._logprobs(plan, output, slots, counts) if output.logprobs else (),
            prompt_logprobs=self._prompt_logprobs(plan, output, resident) if output.prompt_logprobs else (),
        )

    def _end_failed(self, plan: Plan, output: StepOutput) -> list[FinishedSequence]:
        """End the sequences that got an error instead of a token; nothing of them is kept for others."""
        table, ended = self._state.table, []
        for one in output.row_errors:
            slot, epoch = int(plan.slots[one.index]), plan.epochs[one.index]
            sequence = table.sequences[slot]
            if sequence is not None and epoch in (table.epoch[slot], sequence.late_token_epoch):
                reason = FinishReason.INVALID if one.is_invalid else FinishReason.ERROR
                ended.append(self._state.finish(sequence, reason, error=one.message))
        return ended

    # ------------------------------------------------------------------------------------------------ tokens

    def _append(self, slots: Int64Array, counts: Int32Array, token_ids: Int32Array) -> None:
        """Write new tokens after the known ones."""
        state, table = self._state, self._state.table
        if not slots.size:
            return
        known = table.num_known_tokens[slots]
        rows = table.row[slots]
        if len(token_ids) == len(slots):
            state.rows.tokens[rows, known] = token_ids
        else:
            offsets = np.arange(len(token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
            state.rows.tokens[np.repeat(rows, counts), np.repeat(known, counts) + offsets] = token_ids
        table.num_known_tokens[slots] = known + counts
        first = table.first_token_s[slots] == np.inf
        if 1 in first.tobytes():
            now_s = state.clock.now_s()
            table.first_token_s[slots[first]] = now_s
            for slot in slots[first].tolist():
                table.sequence(slot).first_token_s = now_s

    def _finish_ended(self, slots: Int64Array, counts: Int32Array, token_ids: Int32Array) -> list[FinishedSequence]:
        """Finish every sequence whose newest token is its last."""
        if not slots.size:
            return []
        table = self._state.table
        last = token_ids if len(token_ids) == len(slots) else token_ids[np.cumsum(counts) - 1]
        ended = self._stop_check.ended(slots, last)
        if 1 not in ended.tobytes():
            return []
        return [
            self._stop_check.finish(table.sequence(slot), int(token))
            for slot, token in zip(slots[ended].tolist(), last[ended].tolist(), strict=True)
        ]

    # ---------------------------------------------------------------------------------------------- verified tokens

    def _keep_verified(
        self, plan: Plan, output: StepOutput, emits: BoolArray
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Cut runs at the first end, and take back the tokens that were computed in vain."""
        table, num_to_verify = self._state.table, plan.num_to_verify
        num_kept = self.num_kept = np.zeros(plan.num_sequences, np.int32)
        firsts = np.cumsum(output.num_emitted) - output.num_emitted
        slots, counts, parts = plan.slots[emits], [], []
        for i in np.flatnonzero(emits).tolist():
            slot = int(plan.slots[i])
            run = output.token_ids[firsts[i] : firsts[i] + output.num_emitted[i]]
            run = run[: self._first_end(table.sequence(slot), run)]
            counts.append(len(run))
            parts.append(run)
            num_kept[i] = len(run)
            if num_to_verify[i]:
                # The first scheduled token and those that stood have valid KV; the others are computed again.
                table.num_computed_tokens[slot] = int(plan.starts[i]) + len(run)
            table.num_tokens[slot] = table.num_known_tokens[slot] + len(run)
        tokens = np.concatenate(parts) if parts else _EMPTY
        return slots, np.array(counts, np.int32), tokens

    def _first_end(self, sequence: Sequence, run: Int32Array) -> int:
        """Return how many tokens of ``run`` count: up to and with the first that ends the sequence."""
        table, slot = self._state.table, sequence.slot
        known = int(table.num_known_tokens[slot])
        for i, token in enumerate(run.tolist()):
            total = known + i + 1
            stops = token in sequence.stop_token_ids and total >= table.min_total_tokens[slot]
            if stops or total >= table.max_total_tokens[slot]:
                return i + 1
        return len(run)

    # ----------------------------------------------------------------------------------------------- late tokens

    def _commit_late_tokens(
        self, plan: Plan, output: StepOutput, resident: BoolArray
    ) -> list[tuple[int, Int32Array, FinishedSequence | None]]:
        """Give tokens that were in flight when their sequence was preempted to the sequence, which waits."""
        table = self._state.table
        firsts = np.cumsum(output.num_emitted) - output.num_emitted
        late: list[tuple[int, Int32Array, FinishedSequence | None]] = []
        for i in np.flatnonzero(~resident & (output.num_emitted > 0)).tolist():
            slot = int(plan.slots[i])
            sequence = table.sequences[slot]
            if sequence is None or sequence.late_token_epoch != plan.epochs[i]:
                continue
            sequence.late_token_epoch = -1
            run = output.token_ids[firsts[i] : firsts[i] + output.num_emitted[i]]
            if len(run) > 1:
                run = run[: self._first_end(sequence, run)]
            late.append((slot, run, self._stop_check.append(sequence, run)))
        return late

    # ------------------------------------------------------------------------------------------------ blocks

    def _register_blocks(self, plan: Plan, output: StepOutput, places: Int64Array, resident: BoolArray) -> None:
        """Make blocks findable that the step filled with committed tokens."""
        state, table = self._state, self._state.table
        ends = plan.starts + plan.num_scheduled
        if len(self.num_kept):
            ends = np.where(plan.num_to_verify > 0, plan.starts + output.num_emitted, ends)
        full = ends // state.block_size
        grown = resident & (full > table.num_hashed_blocks[places])
        if 1 not in grown.tobytes():
            return
        now_s = state.clock.now_s()
        for slot, num_blocks in zip(plan.slots[grown].tolist(), full[grown].tolist(), strict=True):
            sequence = table.sequences[slot]
            if sequence is None or sequence.state is not SequenceState.RUNNING or sequence.is_provisional:
                continue
            if sequence.is_approximate:
                table.num_hashed_blocks[slot] = num_blocks  # looked at, and not shared
                continue
            tokens = state.rows.tokens[table.row[slot]]
            salt = sequence.request.cache_salt
            state.hasher.extend(sequence.block_hashes, tokens, num_blocks=num_blocks, salt=salt)
            first = int(table.num_hashed_blocks[slot])
            blocks = state.rows.block_tables[table.row[slot], first:num_blocks].tolist()
            if state.prefix_caching:
                state.blocks.register_chain(blocks, sequence.block_hashes, start=first, salt=salt, now_s=now_s)
            for filled in state.on_filled:
                filled(blocks, sequence.block_hashes[first:num_blocks])
            table.num_hashed_blocks[slot] = num_blocks

    # ---------------------------------------------------------------------------------------------- logprobs

    def _logprobs(
        self, plan: Plan, output: StepOutput, slots: Int32Array, counts: Int32Array
    ) -> tuple[TokenLogprobs, ...]:
        """Re-index log-probabilities from the plan to the deltas; those of dropped tokens go."""
        place = {slot: i for i, slot in enumerate(slots.tolist())}
        kept: list[TokenLogprobs] = []
        taken = dict.fromkeys(place.values(), 0)
        for entry in output.logprobs:
            index = place.get(int(plan.slots[entry.index]), -1)
            if index >= 0 and taken[index] < counts[index]:
                taken[index] += 1
                kept.append(_moved(entry, index))
        return tuple(kept)

    def _prompt_logprobs(self, plan: Plan, output: StepOutput, resident: BoolArray) -> tuple[TokenLogprobs, ...]:
        return tuple(
            _moved(entry, int(plan.slots[entry.index])) for entry in output.prompt_logprobs if resident[entry.index]
        )


def _moved(entry: TokenLogprobs, index: int) -> TokenLogprobs:
    return TokenLogprobs(
        index=index,
        position=entry.position,
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


class StopCheck:
    """Decides whether the newest tokens of sequences end them: end-of-sequence, stop token ids, length.

    Args:
        state: The engine's state; changed by all but :meth:`ended`.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._eos = sorted(state.eos_token_ids)

    def ended(self, slots: Int32Array | Int64Array, last: Int32Array) -> BoolArray:
        """Return where the newest token ends the sequence, bool ``[n]``. Pure.

        Args:
            slots: Slots of the sequences, ``[n]``; numpy indexes with ``intp`` at a third of the price.
            last: Their newest tokens, which count as known, ``[n]``.
        """
        table = self._state.table
        known = table.num_known_tokens[slots]
        ended: BoolArray = known >= table.max_total_tokens[slots]
        at_stop: BoolArray = np.zeros(len(last), np.bool_)
        for eos in self._eos:
            at_stop |= last == eos
        own = table.checks_own_stops[slots]
        if 1 in at_stop.tobytes() or 1 in own.tobytes():
            at_stop &= table.checks_eos[slots]
            for i in np.flatnonzero(own).tolist():
                at_stop[i] |= int(last[i]) in table.sequence(int(slots[i])).stop_token_ids
            ended |= at_stop & (known >= table.min_total_tokens[slots])
        return ended

    def finish(self, sequence: Sequence, last: int) -> FinishedSequence:
        """Finish a sequence whose newest token ends it."""
        by_token = last in sequence.stop_token_ids
        return self._state.finish(
            sequence,
            FinishReason.STOP if by_token else FinishReason.LENGTH,
            stop_token_id=last if by_token else None,
        )

    def append(self, sequence: Sequence, run: Int32Array) -> FinishedSequence | None:
        """Give tokens to a sequence that holds no row; returns it if the last of them ends it.

        Args:
            sequence: It waits, for remote KV or to run.
            run: At least one token.
        """
        table, slot = self._state.table, sequence.slot
        sequence.tokens = np.concatenate([sequence.tokens, run])
        table.num_known_tokens[slot] = len(sequence.tokens)
        table.num_tokens[slot] = max(table.num_tokens[slot], len(sequence.tokens))
        if sequence.first_token_s is None:
            sequence.first_token_s = table.first_token_s[slot] = self._state.clock.now_s()
        ends = self.ended(np.array([slot], np.int32), run[-1:])[0]
        return self.finish(sequence, int(run[-1])) if ends else None
