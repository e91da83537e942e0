"""Scheduling for a pipeline: as many batches of different sequences in flight as there are stages, each with as much to do.

    stage 0   A  B  C  A  B  C        A goes on when its tokens are known: when its last stage is done
    stage 1      A  B  C  A  B  C
    stage 2         A  B  C  A  B

A batch that is twice as long as the others makes every stage wait for it, so running sequences and prompt tokens are shared out evenly.
The policy need not know of that: it is asked what it is always asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from trencadis.engine.guards import GuardedScheduling
from trencadis.engine.state import EngineState
from trencadis.faults import CallMeter
from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import BoolArray, Int64Array

__all__ = ["PipelinedScheduling"]

_LEAST_PREFILL: Final = 64
"""Prompt tokens that a batch may always have: fewer make it hardly longer, and a prompt that is cut finishes a batch later."""


class PipelinedScheduling(GuardedScheduling):
    """A guarded scheduling policy, of whose answers a batch gets its share.

    Args:
        label: See :class:`GuardedScheduling`.
        strategy: See :class:`GuardedScheduling`.
        make_fallback: See :class:`GuardedScheduling`.
        meter: See :class:`GuardedScheduling`.
        state: The engine's, read only.
        num_batches: In flight at once, at least 2.
    """

    def __init__(
        self,
        label: str,
        strategy: SchedulingPolicy,
        make_fallback: Callable[[], SchedulingPolicy] | None = None,
        *,
        meter: CallMeter | None = None,
        state: EngineState,
        num_batches: int,
    ) -> None:
        super().__init__(label, strategy, make_fallback, meter=meter)
        self._state = state
        self._num_batches = num_batches
        self._in_flight: deque[int] = deque(maxlen=num_batches - 1)
        """Prompt tokens of the last batches."""
        self._taken = self._withheld = self._num_decodes = 0

    def may_run(self, places: Int64Array) -> BoolArray:
        """Return who of the running sequences may be in the next batch: none whose newest token is in flight, and a share of the decodes.

        A decode that is left out, because the batches in flight are smaller than their share, is in one of the next ``num_batches - 1``:
        after as many full batches in a row nothing is left over.

        Args:
            places: Slots of all running sequences, ``[n]``.
        """
        table, num_batches = self._state.table, self._num_batches
        num_tokens = table.num_tokens[places]
        may_run: BoolArray = num_tokens == table.num_known_tokens[places]
        is_decode = num_tokens - table.num_computed_tokens[places] == 1  # that in flight goes on as one
        share = -(-int(np.count_nonzero(is_decode)) // num_batches)
        decodes = np.flatnonzero(may_run & is_decode)
        may_run[decodes[share:]] = False
        self._num_decodes = min(len(decodes), share)
        return may_run

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return the policy's budgets, that of prefills cut to the batch's share of all prompt tokens that wait or are in flight."""
        split = super().split(view, token_budget=token_budget)
        self._in_flight.append(self._taken)
        self._taken = 0
        left = view.num_tokens[view.running] - view.num_computed_tokens[view.running]
        num_tokens = int(left[left > 1].sum()) + self._state.num_waiting_tokens + sum(self._in_flight)
        prefill = min(split.prefill, max(-(-num_tokens // self._num_batches), _LEAST_PREFILL))
        most = min(split.prefill, token_budget - min(split.decode, self._num_decodes))
        self._withheld = max(most - prefill, 0)
        return TokenSplit(decode=split.decode, prefill=prefill)

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return what the policy gives a prompt of the batch's share, or of the whole budget if it gives nothing of the share alone."""
        whole = super().chunk(
            view, slot=slot, num_remaining=num_remaining, token_budget=token_budget + self._withheld
        )
        chunk = whole
        if whole > token_budget:
            chunk = super().chunk(view, slot=slot, num_remaining=num_remaining, token_budget=token_budget) or whole
        self._taken += chunk
        return chunk
