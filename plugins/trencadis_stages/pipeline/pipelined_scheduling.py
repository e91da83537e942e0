"""Scheduling for a pipeline: as many batches of different sequences in flight as there are stages, each with as much to do.

    stage 0   A  B  C  A  B  C        A goes on when its tokens are known: when its last stage is done
    stage 1      A  B  C  A  B  C
    stage 2         A  B  C  A  B

A batch that is longer than the others makes every stage wait for it, so running sequences and prompt tokens are shared out over batches.
The policy need not know of that: it is asked what it is always asked.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.state import EngineState
from trencadis.faults import CallMeter
from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import BoolArray, Int64Array

__all__ = ["PipelinedScheduling"]

_NUM_ROUNDS: Final = 12
"""Batches over which prompts are shared out where more wait than fit, in rounds of the pipeline.

A sequence that ends makes room for a prompt: fewer rounds make one batch longer than its neighbours, more keep rows from decoding. In the
exact model of ``benchmarks/micro/pipeline.py`` 1, 4, 8, 12 and 16 rounds leave four stages idle for 30, 15, 10, 7 and 7 % of their time,
where a token takes 1 ms and a batch 8.
"""
_LEAST_PREFILL: Final = 32
"""Prompt tokens that a batch may always have: fewer make it hardly shorter, and a prompt that is cut ends a batch later."""


class PipelinedScheduling(GuardedScheduling):
    """A guarded scheduling policy, of whose answers a batch gets its share.

    Args:
        state: The engine's, read only.
        label: See :class:`GuardedScheduling`.
        strategy: See :class:`GuardedScheduling`.
        make_fallback: See :class:`GuardedScheduling`.
        meter: See :class:`GuardedScheduling`.
        num_batches: In flight at once, at least 2.
    """

    restored = ("_recent", "_taken", "_withheld", "_num_decodes")

    def __init__(
        self,
        state: EngineState,
        label: str,
        strategy: SchedulingPolicy,
        make_fallback: Callable[[], SchedulingPolicy] | None = None,
        *,
        meter: CallMeter | None = None,
        num_batches: int,
    ) -> None:
        super().__init__(label, strategy, make_fallback, meter=meter)
        self._state = state
        self._num_batches = num_batches
        self._recent: deque[int] = deque(maxlen=_NUM_ROUNDS * num_batches - 1)
        """Prompt tokens of the last batches, newest first."""
        self._taken = self._withheld = self._num_decodes = 0

    def copy_state(self) -> dict[str, Any]:
        """Return copies of what is counted from batch to batch."""
        return {**super().copy_state(), "_recent": list(self._recent)}

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Take what another engine has counted."""
        super().restore_state({**values, "_recent": deque(values["_recent"], self._recent.maxlen)})

    def runnable(self, places: Int64Array) -> BoolArray:
        """Return who of the running sequences may be in the next batch: none whose newest token is in flight, and a share of the decodes.

        A decode is left out only while some batch in flight is smaller than its share, and after ``num_batches - 1`` full ones none is.

        Args:
            places: Slots of all running sequences, ``[n]``.
        """
        table = self._state.table
        num_tokens = table.num_tokens[places]
        is_runnable: BoolArray = num_tokens == table.num_known_tokens[places]
        is_decode = num_tokens - table.num_computed_tokens[places] == 1  # in flight, it goes on as one
        share = -(-int(np.count_nonzero(is_decode)) // self._num_batches)
        decodes = np.flatnonzero(is_runnable & is_decode)
        is_runnable[decodes[share:]] = False
        self._num_decodes = min(len(decodes), share)
        return is_runnable

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return the policy's budgets, that of prefills cut to the batch's share of prompt tokens.

        What can be computed is shared out over the batches of one round, so that a prompt is through soon; if more waits than fits, over
        those of several. Tokens in the last of these batches are counted in: a prompt is cut into equal parts, not into ever smaller ones.
        """
        split = self.ask.split(view, token_budget=token_budget)
        self._recent.appendleft(self._taken)
        self._taken = 0
        left = view.num_tokens[view.running] - view.num_computed_tokens[view.running]
        fitting = self._fitting(view)
        is_full = fitting < self._state.num_waiting_tokens
        num_shares = self._num_batches * (_NUM_ROUNDS if is_full else 1)
        num_tokens = int(left[left > 1].sum()) + fitting + sum(itertools.islice(self._recent, num_shares - 1))
        prefill = min(split.prefill, max(-(-num_tokens // num_shares), _LEAST_PREFILL))
        most = min(split.prefill, token_budget - min(split.decode, self._num_decodes))
        self._withheld = max(most - prefill, 0)
        return TokenSplit(decode=split.decode, prefill=prefill)

    def _fitting(self, view: SchedulerView) -> int:
        """Return about how many tokens of waiting sequences there are rows and blocks for, if they have the mean length. Pure."""
        num_waiting = len(view.waiting)
        by_rows = self._state.num_waiting_tokens * min(view.num_free_rows, num_waiting) // max(num_waiting, 1)
        return min(by_rows, view.num_free_blocks * view.block_size)

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return what the policy gives a prompt of the batch's share; where it gives nothing of that, what it gives of the whole budget.

        So one that takes prompts whole does so.
        """
        chunk = self.ask.chunk(view, slot=slot, num_remaining=num_remaining, token_budget=token_budget + self._withheld)
        if chunk > token_budget:
            chunk = self.ask.chunk(view, slot=slot, num_remaining=num_remaining, token_budget=token_budget) or chunk
        self._taken += chunk
        return chunk
