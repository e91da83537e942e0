"""Cost-aware eviction with ageing: the least saved compute per byte goes first."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.interfaces import plain_state
from trencadis_plugins.eviction.candidates import Candidates
from trencadis_plugins.eviction.config import CostAwareConfig
from trencadis_plugins.eviction.history import History
from trencadis_plugins.eviction.tracking import TrackingPolicy

__all__ = ["CostAware"]


@plain_state
class CostAware(TrackingPolicy):
    """Evicts the block of lowest worth: ``clock + uses x cost``, O(log n) a block.

    The clock is the worth of what was evicted last, so a block that is no longer used is overtaken: that is the recency. All blocks
    have one size, so compute per byte is compute per block. The cost of the block at depth d, in units of the first one, is
    ``1 + d / attention_blocks``: the weights cost every token alike, attention as much as there are tokens before it. For a model of
    P weights in L layers of width w it costs as much as the weights at 2 P / (4 L w) tokens.

    A block is worth at least what can only be found through it, so the worth never falls from tail to head, nor while a content
    stays. Uses of evicted contents are remembered, as many as ``history`` times the cache.

    Source: Cherkasova, "Greedy-Dual-Size-Frequency", HPL-98-69, 1998, K(f) = L + F(f) x C(f) / S(f); saved compute per byte as the
    cost: Pan et al., "Marconi", MLSys 2025.

    Args:
        config: Cost of attention, and length of the memory.
    """

    def __init__(self, config: CostAwareConfig | None = None) -> None:
        super().__init__()
        self._config = config or CostAwareConfig()
        self._clock = 0.0
        self._worth_behind = 0.0
        self._num_uses: dict[int, int] = {}
        self._worth: dict[int, float] = {}
        self._cost: dict[int, float] = {}
        self._candidates = Candidates()
        self._history: History[int] = History()

    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        """Count the first use, or one more of a content with a ghost entry."""
        attention_blocks = self._config.attention_blocks
        self._cost[block] = 1.0 + depth / attention_blocks if attention_blocks else 1.0
        self._num_uses[block] = self._history.recall(key) or 0
        self._worth[block] = 0.0
        self.reuse(block)

    def reuse(self, block: int) -> None:
        """Count a use, and compute the worth at the present clock."""
        self._num_uses[block] += 1
        worth = self._clock + self._num_uses[block] * self._cost[block]
        self._worth[block] = max(self._worth[block], worth)

    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Add the blocks as candidates; none gets a lower worth than those after it."""
        self._worth_behind = 0.0
        super().on_free(blocks, depths=depths, now_s=now_s)

    def offer(self, block: int) -> None:
        """Add the candidate, ranked by worth."""
        self._worth_behind = self._worth[block] = max(self._worth[block], self._worth_behind)
        self._candidates.add(block, self._worth[block])

    def withdraw(self, block: int) -> None:
        """Remove the candidate."""
        self._candidates.discard(block)

    def choose(self) -> int:
        """Return the candidate of lowest worth; the clock advances to it."""
        self._clock = max(self._clock, self._candidates.lowest_rank())
        return self._candidates.take()

    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        """Add a ghost entry with the number of uses."""
        num_uses = self._num_uses.pop(block)
        del self._worth[block], self._cost[block]
        if evicted:
            self._history.remember(key, num_uses, most=self._config.history * self.capacity)
