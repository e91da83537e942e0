from __future__ import annotations

import pytest

from support.strategies.block_histories import ReferenceCache, conversations, hits_of
from trencadis_plugins.eviction.config import CostAwareConfig
from trencadis_plugins.eviction.cost_aware import CostAware
from trencadis_testing.eviction import EvictionConformance


class TestCostAware(EvictionConformance):
    make = CostAware


class TestCostAwareWithAttention(EvictionConformance):
    def make(self) -> CostAware:
        return CostAware(CostAwareConfig(attention_blocks=3))


class Reference(ReferenceCache):
    """Greedy-Dual-Size-Frequency with sizes and costs of 1, over a dictionary."""

    def __init__(self, capacity: int, history: float) -> None:
        super().__init__(capacity)
        self.most = history * capacity
        self.clock = 0.0
        self.freq: dict[int, int] = {}
        self.key: dict[int, float] = {}
        self.gone: dict[int, int] = {}

    def use(self, content: int, now_s: float) -> None:
        self.freq[content] = self.freq.get(content, self.gone.pop(content, 0)) + 1
        worth = max(self.key.pop(content, 0.0), self.clock + self.freq[content])
        self.key[content] = worth  # at the end: the newest of its worth

    def evict_one(self) -> int:
        content = min(self.key, key=self.key.__getitem__)
        self.clock = max(self.clock, self.key.pop(content))
        self.gone[content] = self.freq.pop(content)
        while len(self.gone) > self.most:
            del self.gone[next(iter(self.gone))]
        return content


@pytest.mark.representatives(3)
@pytest.mark.parametrize("history", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_greedy_dual_size_frequency(seed: int, history: float) -> None:
    requests = conversations(seed)
    wanted = Reference(30, history).hits(requests)
    assert hits_of(lambda: CostAware(CostAwareConfig(history=history)), requests, 30) == wanted > 0


def freed(policy: CostAware, blocks: list[int], *, first_depth: int = 0) -> None:
    depths = list(range(first_depth, first_depth + len(blocks)))
    policy.on_use(blocks, keys=[bytes([block]) for block in blocks], depths=depths, salt="", now_s=0.0)
    policy.on_free(blocks[::-1], depths=depths[::-1], now_s=0.0)


def test_deep_block_is_worth_more_where_attention_counts() -> None:
    policy = CostAware(CostAwareConfig(attention_blocks=10))
    freed(policy, [9], first_depth=20)
    freed(policy, [1])
    assert policy.victims(2) == [1, 9]
    policy = CostAware()
    freed(policy, [9], first_depth=20)
    freed(policy, [1])
    assert policy.victims(2) == [9, 1]


@pytest.mark.parametrize("attention_blocks", [0, 1, 10])
def test_head_of_a_chain_outlives_its_costlier_tail(attention_blocks: int) -> None:
    policy = CostAware(CostAwareConfig(attention_blocks=attention_blocks))
    freed(policy, [1, 2, 3, 4])
    assert policy.victims(4) == [4, 3, 2, 1]


def test_block_used_often_is_overtaken_by_newer_ones_in_the_end() -> None:
    policy = CostAware()
    for _ in range(3):
        policy.on_hit([1], now_s=0.0)
        freed(policy, [1])
    survived = 0
    for block in range(2, 12):
        freed(policy, [block])
        if policy.victims(1) == [1]:
            break
        survived += 1
    assert survived == 2
