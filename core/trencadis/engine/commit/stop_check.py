"""When a text is complete: the same for tokens of a step and for those that come otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trencadis.engine.sequence import Sequence
from trencadis.records import BoolArray, FinishedSequence, FinishReason, Int32Array, Int64Array

if TYPE_CHECKING:
    from trencadis.engine.state import EngineState

__all__ = ["Endings"]


class Endings:
    """Judges newest tokens of one engine's sequences.

    Args:
        state: The engine's state; changed by all but :meth:`ended`.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._eos = sorted(state.eos_token_ids)

    def ended(self, slots: Int32Array | Int64Array, last: Int32Array) -> BoolArray:
        """Return where the newest token ends the sequence, bool ``[n]``. Pure.

        Args:
            slots: Of the sequences, ``[n]``; numpy indexes with ``intp`` at a third of the price.
            last: Their newest tokens, which count as known, ``[n]``.
        """
        table = self._state.table
        known = table.num_known_tokens[slots]
        ended: BoolArray = known >= table.max_total_tokens[slots]
        at_stop = self._is_eos(last)
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

    def adopt(self, sequence: Sequence, run: Int32Array) -> FinishedSequence | None:
        """Give tokens to a sequence that holds no row; returns it if the last of them ends it.

        Args:
            sequence: It waits, or is parked.
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

    def _is_eos(self, token_ids: Int32Array) -> BoolArray:
        if not self._eos:
            return np.zeros(len(token_ids), np.bool_)
        hits: BoolArray = token_ids == self._eos[0]
        for eos in self._eos[1:]:
            hits |= token_ids == eos
        return hits
