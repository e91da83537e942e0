"""LeCaR: evicts by recency or by frequency, and learns from what it regrets which of the two to follow.

    victim of recency or of frequency, drawn by weight ──▶ remembered by the one that chose it
                                       weight of that one goes down ◀── a remembered content comes back

Name it by import path, ``eviction.name = "examples.gallery.eviction.lecar:LeCaR"``, or as the plugin that this module is.

Source: Vietri et al., "Driving Cache Replacement with ML-based LeCaR", HotStorage 2018, algorithms 1 and 2; constants, the bounds of the
weights and the rule for a victim on which both agree are those of the authors' program, github.com/sylab/LeCaR.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

import attrs
from attrs.validators import gt

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, EvictionPolicy, setting

__all__ = ["LeCaR", "LeCaRConfig", "trencadis_eviction_policies"]

_DISCOUNT = 0.005
"""What a regret counts after as many uses as the cache has blocks, against one at once."""

_MOST_WEIGHT = 0.99


class LeCaR(EvictionPolicy):
    """Two experts, least recently and least frequently used, and a weight for each. O(log n) a block.

    Args:
        learning_rate: Of the weights.
        context: Gives the seed of the draws.
    """

    def __init__(self, learning_rate: float = 0.45, context: ComponentContext | None = None) -> None:
        self._learning_rate = learning_rate
        self._draws = random.Random(0 if context is None else context.seed)
        self._weights = [0.5, 0.5]
        self._histories: tuple[OrderedDict[bytes, tuple[int, int]], ...] = (OrderedDict(), OrderedDict())
        self._num_accesses = 0
        self._capacity = 0
        self._key_of: dict[int, bytes] = {}
        self._num_uses: dict[int, int] = {}
        self._by_recency: OrderedDict[int, int] = OrderedDict()
        self._by_frequency: list[tuple[int, int, int]] = []
        self._numbers = count()

    def on_use(
        self, blocks: Sequence[int], *, keys: Sequence[bytes], depths: Sequence[int], salt: str, now_s: float
    ) -> None:
        """Count uses; a content that comes back after its eviction moves the weights and keeps its count."""
        for block, key in zip(blocks, keys, strict=True):
            self._num_accesses += 1
            if self._key_of.get(block) == key:
                self._num_uses[block] += 1
                continue
            self.forget([block])
            self._key_of[block] = key
            self._num_uses[block] = self._regret(key) + 1

    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Add the blocks as the most recently used ones."""
        for block in blocks:
            self._key_of.setdefault(block, b"")
            num_uses = self._num_uses.setdefault(block, 1)
            number = self._by_recency[block] = next(self._numbers)
            heapq.heappush(self._by_frequency, (num_uses, number, block))
        if len(self._by_frequency) > 2 * len(self._by_recency) + 64:  # most are of blocks that were hit since
            self._by_frequency = [one for one in self._by_frequency if self._by_recency.get(one[2]) == one[1]]
            heapq.heapify(self._by_frequency)

    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Remove the candidates."""
        for block in blocks:
            del self._by_recency[block]

    def victims(self, num_blocks: int) -> list[int]:
        """Let a drawn expert choose, block by block."""
        self._capacity = len(self._key_of) - num_blocks
        chosen = []
        for _ in range(num_blocks):
            least = next(iter(self._by_recency)), self._least_frequent()
            expert = int(self._draws.random() >= self._weights[0])
            block = least[expert]
            key, num_uses = self._drop(block)
            if key and least[0] != least[1]:  # both agree: there is nothing to learn
                history = self._histories[expert]
                history[key] = self._num_accesses, num_uses
                while len(history) > self._capacity:
                    history.popitem(last=False)
            chosen.append(block)
        return chosen

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop contents without a trace; unknown blocks are ignored."""
        for block in blocks:
            if block in self._key_of:
                self._drop(block)

    def _regret(self, key: bytes) -> int:
        """Lower the weight of the expert that evicted a content which is wanted again; return how often it had been used."""
        for expert, history in enumerate(self._histories):
            if key in history:
                evicted_at, num_uses = history.pop(key)
                discount = _DISCOUNT ** ((self._num_accesses - evicted_at) / max(1, self._capacity))
                self._weights[expert] *= math.exp(-self._learning_rate * discount)
                share = self._weights[0] / sum(self._weights)
                share = min(_MOST_WEIGHT, max(1 - _MOST_WEIGHT, share))
                self._weights = [share, 1 - share]
                return num_uses
        return 0

    def _least_frequent(self) -> int:
        """Return the candidate with the fewest uses, of equals the one freed first."""
        while self._by_recency.get(self._by_frequency[0][2]) != self._by_frequency[0][1]:
            heapq.heappop(self._by_frequency)  # hit or dropped since
        return self._by_frequency[0][2]

    def _drop(self, block: int) -> tuple[bytes, int]:
        self._by_recency.pop(block, None)
        return self._key_of.pop(block), self._num_uses.pop(block)


@attrs.frozen(kw_only=True)
class LeCaRConfig:
    """Table ``[eviction.lecar]``."""

    learning_rate: float = setting(0.45, "Of the weights of recency and frequency.", validator=gt(0))


@hookimpl
def trencadis_eviction_policies() -> Iterable[Component]:
    """Yield ``lecar``."""
    yield Component(
        name="lecar",
        factory=lambda config, context: LeCaR(config.learning_rate, context),
        config=LeCaRConfig,
        summary="Recency or frequency, as regret over earlier choices suggests.",
        interface_version=1,
        stability="experimental",
    )
