"""A load that a sequence waits for, and its two outcomes.

blocks of the sequence:   0 ‥ first     first ‥ last       last ‥
                          local hit     being loaded       to be computed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trencadis.engine.sequences import Sequence
from trencadis.records import Int32Array

if TYPE_CHECKING:
    from trencadis.engine.cache.block_manager import BlockManager
    from trencadis.engine.state import EngineState

__all__ = ["WaitingLoad"]


@attrs.frozen(kw_only=True, eq=False)
class WaitingLoad:
    """A load of KV blocks that a sequence waits for.

    Attributes:
        sequence: The sequence that waits.
        blocks: For all its tokens, int32 ``[n]``.
        first: Place of the first block that is loaded.
        last: Place after the last one.
        is_approximate: The loaded values approximate those that computing would give.
    """

    sequence: Sequence
    blocks: Int32Array
    first: int
    last: int
    is_approximate: bool

    @property
    def filled(self) -> slice:
        """Places of the blocks that the connector fills; an approximate one also reads the local hit."""
        return slice(0 if self.is_approximate else self.first, self.last)

    def end(self, state: EngineState, *, num_valid_tokens: int | None = None) -> None:
        """Let the sequence run with the blocks that arrived.

        Args:
            state: Of the engine; changed.
            num_valid_tokens: Of those that were loaded; None: all.
        """
        sequence, num_valid = self.sequence, self.last
        if num_valid_tokens is not None:
            num_valid = max(self.first, min(self.last, self.first + num_valid_tokens // state.block_size))
        sequence.transfer_id = -1
        if self.is_approximate:
            sequence.is_approximate = num_valid > self.first
            sequence.num_approximate_tokens = (num_valid - self.first) * state.block_size
        else:
            state.blocks.register_chain(
                self.blocks[:num_valid].tolist(),
                sequence.block_hashes,
                start=0,
                salt=sequence.request.cache_salt,
                now_s=state.clock.now_s(),
            )
        sequence.loaded_blocks = self.blocks
        sequence.num_loaded_tokens = num_valid * state.block_size
        state.end_remote_kv_wait(sequence)

    def give_up(self, blocks: BlockManager, *, now_s: float) -> Int32Array:
        """Free the blocks that no transfer touches; return the others, which the caller has to free."""
        blocks.release(np.concatenate([self.blocks[: self.first], self.blocks[self.last :]]), now_s=now_s)
        return self.blocks[self.first : self.last]
