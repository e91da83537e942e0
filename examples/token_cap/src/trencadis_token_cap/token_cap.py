"""Holds back sequences of tenants whose KV has reached a cap."""

from __future__ import annotations

from collections import Counter

from trencadis.engine.sequences import Claim, Sequence, When
from trencadis.engine.stage import EngineParts, Stage

__all__ = ["TokenCap"]


class HeldBack(Claim):
    """No KV, but a reason to wait: the stage is asked again in the next plan."""

    when = When.PENDING
    reason = "its tenant holds as many tokens of KV as it may"


HELD_BACK = HeldBack()


class TokenCap(Stage):
    """Lets a sequence in only if its tenant holds fewer tokens of KV than the cap.

    A tenant that holds nothing is let in whatever its prompt's length, so every sequence runs in the end.

    Args:
        max_tokens: The cap, at least 1.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held: Counter[str] | None = None  # tokens by tenant; None: to be counted
        self._running: object = None
        self._num_aside = 0

    def bind(self, engine: EngineParts) -> None:
        """Take the state, which knows who holds what."""
        self._state = engine.state

    def before_step(self) -> None:
        """Count anew in this step: sequences have grown."""
        self._held = None

    def claim(self, sequence: Sequence, *, num_found: int) -> Claim | None:
        """Hold a sequence back if its tenant has reached the cap."""
        state = self._state
        # A plan that lets one in, or sets one aside to load its KV, changes these two.
        if self._held is None or self._running is not state.running or self._num_aside != len(state.aside):
            self._running, self._num_aside = state.running, len(state.aside)
            self._held = self._count()
        is_full = self._held[self._tenant(sequence)] >= self._max_tokens
        return HELD_BACK if is_full else None

    def _count(self) -> Counter[str]:
        """Return the tokens of sequences that run or hold blocks while their KV is loaded, by tenant. O(running + aside)."""
        state, table = self._state, self._state.table
        held: Counter[str] = Counter()
        # A sequence whose KV was loaded is at the front of the queue until it runs.
        fronts = state.waiting.slots[: state.waiting.num_front].tolist()
        for slot in (*state.running.tolist(), *state.aside, *fronts):
            sequence = table.sequence(slot)
            kept = sequence.claim
            if table.row[slot] >= 0 or (kept is not None and kept.blocks is not None):
                held[self._tenant(sequence)] += int(table.num_tokens[slot])
        return held

    def _tenant(self, sequence: Sequence) -> str:
        return sequence.request.tenant.partition("/")[0]
