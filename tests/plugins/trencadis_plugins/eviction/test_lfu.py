from __future__ import annotations

import math

import pytest

from support.strategies.block_histories import ReferenceCache, conversations, hits_of
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_plugins.eviction import trencadis_eviction_policies
from trencadis_plugins.eviction.config import LfuConfig
from trencadis_plugins.eviction.lfu import Lfu
from trencadis_testing.eviction import EvictionConformance


class TestLfu(EvictionConformance):
    make = Lfu


class TestLfuWithoutAgeing(EvictionConformance):
    def make(self) -> Lfu:
        return Lfu(LfuConfig(half_life_s=0.0, history=0.0))


class Reference(ReferenceCache):
    """Sums the present weights of all uses anew for each eviction."""

    def __init__(self, capacity: int, half_life_s: float, history: float) -> None:
        super().__init__(capacity)
        self.half_life_s, self.most = half_life_s, history * capacity
        self.uses: dict[int, list[float]] = {}
        self.order: list[int] = []
        self.gone: dict[int, list[float]] = {}
        self.now_s = 0.0

    def use(self, content: int, now_s: float) -> None:
        self.now_s = now_s
        self.uses.setdefault(content, self.gone.pop(content, [])).append(now_s)
        if content in self.order:
            self.order.remove(content)
        self.order.append(content)

    def weight(self, content: int) -> float:
        if not self.half_life_s:
            return len(self.uses[content])
        return round(sum(2 ** (-(self.now_s - then) / self.half_life_s) for then in self.uses[content]), 12)

    def evict_one(self) -> int:
        content = min(self.order, key=self.weight)
        self.order.remove(content)
        self.gone[content] = self.uses.pop(content)
        while len(self.gone) > self.most:
            del self.gone[next(iter(self.gone))]
        return content


@pytest.mark.slow
@pytest.mark.parametrize(("half_life_s", "history"), [(50.0, 4.0), (50.0, 0.0), (0.0, 0.0), (0.0, 1.0), (400.0, 1.0)])
@pytest.mark.parametrize("seed", range(2))
def test_hits_are_those_of_sums_over_all_uses(seed: int, half_life_s: float, history: float) -> None:
    requests = conversations(seed, num_requests=250)
    wanted = Reference(30, half_life_s, history).hits(requests)
    config = LfuConfig(half_life_s=half_life_s, history=history)
    assert hits_of(lambda: Lfu(config), requests, 30) == wanted > 0


def two_old_uses_and_a_new_one(half_life_s: float) -> list[int]:
    component = {one.name: one for one in trencadis_eviction_policies()}["lfu"]
    lfu = component.factory(LfuConfig(half_life_s=half_life_s), ComponentContext(clock=SimulatedClock(), seed=0))
    for block, now_s in ((1, 0.0), (1, 0.0), (2, 100.0)):
        lfu.on_use([block], keys=[bytes([block])], depths=[0], salt="", now_s=now_s)
    lfu.on_free([1, 2], depths=[0, 0], now_s=100.0)
    return lfu.victims(2)


def test_two_uses_count_less_than_one_after_more_than_a_half_life() -> None:
    assert two_old_uses_and_a_new_one(half_life_s=99.0) == [1, 2]
    assert two_old_uses_and_a_new_one(half_life_s=101.0) == [2, 1]
    assert two_old_uses_and_a_new_one(half_life_s=0.0) == [2, 1]


def test_score_stays_finite_after_years() -> None:
    lfu = Lfu(LfuConfig(half_life_s=1.0))
    for block, now_s in ((1, 0.0), (1, 1e9), (2, 1e9 + 5.0)):
        lfu.on_use([block], keys=[bytes([block])], depths=[0], salt="", now_s=now_s)
        assert all(math.isfinite(score) for score in lfu._score.values())
    lfu.on_free([2, 1], depths=[0, 0], now_s=1e9 + 5.0)
    assert lfu.victims(2) == [1, 2]
