"""A load that a sequence waits for, and its two outcomes.

blocks of the sequence:   0 ‥ first     first ‥ last       last ‥
                          local hit     being loaded       to be computed
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from trencadis.engine.sequences import Claim, Sequence, When
from trencadis.engine.state import EngineState
from trencadis.interfaces import Lookup
from trencadis.records import Int32Array

__all__ = ["WaitingLoad"]

_NONE = np.empty(0, np.int32)


class _Books(Protocol):
    """The part of the books of transfers that a load needs; see :class:`~trencadis_stages.transfer.transfers.Transfers`."""

    def load(self, load: WaitingLoad, found: Lookup) -> None: ...

    def put_back(self, sequence: Sequence, found: Lookup) -> None: ...

    def cancel(self, transfer_id: int) -> None: ...


class WaitingLoad(Claim):
    """A load of KV blocks that a sequence waits for; when it has ended, what the sequence has of it.

    Args:
        transfers: The books that it is kept in.
        sequence: The sequence that waits.
        found: The connector's hit.
        last: Place after the last block that is loaded.

    Attributes:
        all_blocks: For all the sequence's tokens, int32 ``[n]``; empty before it has begun.
        first: Place of the first block that is loaded.
        deadline_s: When it is given up.
    """

    when = When.AFTER_LOAD
    counts_as_cached = True
    reason = "loading"

    def __init__(self, transfers: _Books, sequence: Sequence, found: Lookup, *, last: int) -> None:
        self.transfer_id = found.transfer_id
        self.sequence = sequence
        self.all_blocks: Int32Array = _NONE
        self.first, self.last = 0, last
        self.is_approximate = found.approximate
        self.deadline_s = 0.0
        self._transfers = transfers
        self._found = found
        self._is_over = False

    def begin(self, sequence: Sequence, blocks: Int32Array, *, num_found: int) -> bool:
        """Begin the load; or, when it has ended, take its blocks."""
        if not self._is_over:
            self.all_blocks, self.first = blocks, num_found
            self._transfers.load(self, self._found)
        return True

    def unused(self) -> None:
        """Tell the connector that nothing is loaded of its hit now."""
        self._transfers.put_back(self.sequence, self._found)

    def drop(self, sequence: Sequence) -> None:
        """Cancel the load if it has not ended."""
        if not self._is_over:
            self._transfers.cancel(self.transfer_id)

    @property
    def filled(self) -> slice:
        """Places of the blocks that the connector fills; an approximate one also reads the local hit."""
        return slice(0 if self.is_approximate else self.first, self.last)

    def end(self, state: EngineState, *, num_valid_tokens: int | None = None) -> None:
        """Let the sequence run with the blocks that arrived.

        Args:
            state: The engine's state; changed.
            num_valid_tokens: Tokens of those that were loaded whose KV arrived; None: all.
        """
        sequence, num_valid = self.sequence, self.last
        if num_valid_tokens is not None:
            num_valid = max(self.first, min(self.last, self.first + num_valid_tokens // state.block_size))
        if self.is_approximate:
            sequence.is_approximate = num_valid > self.first
            sequence.num_approximate_tokens = (num_valid - self.first) * state.block_size
        else:
            state.blocks.register_chain(
                self.all_blocks[:num_valid].tolist(),
                sequence.block_hashes,
                start=0,
                salt=sequence.request.cache_salt,
                now_s=state.clock.now_s(),
            )
        self._is_over, self.when = True, When.NOW
        self.blocks, self.num_tokens = self.all_blocks, num_valid * state.block_size
        state.resume(sequence, front=True)

    def give_up(self, state: EngineState) -> Int32Array:
        """Free the blocks that no transfer touches; return the others, which the caller has to free."""
        self._is_over = True
        untouched = np.concatenate([self.all_blocks[: self.first], self.all_blocks[self.last :]])
        state.blocks.release(untouched, now_s=state.clock.now_s())
        return self.all_blocks[self.first : self.last]
