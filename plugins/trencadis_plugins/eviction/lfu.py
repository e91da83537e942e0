"""LFU with ageing and ghost entries."""

from __future__ import annotations

from math import log2

from trencadis.interfaces import plain_state
from trencadis_plugins.eviction.candidates import Candidates
from trencadis_plugins.eviction.config import LfuConfig
from trencadis_plugins.eviction.history import History
from trencadis_plugins.eviction.tracking import TrackingPolicy

__all__ = ["Lfu"]


@plain_state
class Lfu(TrackingPolicy):
    """Evicts the content of lowest score; of equals the least recently used, tail first. O(log n) a block.

    A use at time t weighs 2^(-(now - t) / half-life). All weights shrink alike, so their order only changes with a use, and a
    score that never has to be touched orders as they do: log2 of the sum of 2^(t / half-life). Without a half-life the score
    is the number of uses. Scores of evicted contents are remembered, as many as ``history`` times the cache.

    Source: Lee et al., "LRFU", IEEE Transactions on Computers 50 (12), 2001, with F(x) = 2^(-x / half-life).

    Args:
        config: Half-life and length of the memory.
    """

    def __init__(self, config: LfuConfig | None = None) -> None:
        super().__init__()
        self._config = config or LfuConfig()
        self._candidates = Candidates()
        self._score: dict[int, float] = {}
        self._history: History[float] = History()

    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        """Start with one use, or with an evicted content's score."""
        self._score[block] = self._used(self._history.recall(key))

    def reuse(self, block: int) -> None:
        """Add a use to the score."""
        self._score[block] = self._used(self._score[block])

    def offer(self, block: int) -> None:
        """Add the candidate, ranked by score."""
        self._candidates.add(block, self._score[block])

    def withdraw(self, block: int) -> None:
        """Remove the candidate."""
        self._candidates.discard(block)

    def choose(self) -> int:
        """Return the candidate of lowest score."""
        return self._candidates.take()

    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        """Add a ghost entry with the score."""
        score = self._score.pop(block)
        if evicted:
            self._history.remember(key, score, most=self._config.history * self.capacity)

    def _used(self, score: float | None) -> float:
        """Return the score with one more use, now."""
        half_life_s = self._config.half_life_s
        if not half_life_s:
            return 1.0 + (score or 0.0)
        use = self.now_s / half_life_s
        if score is None:
            return use
        most = max(score, use)
        return most + log2(2.0 ** (score - most) + 2.0 ** (use - most))
