from __future__ import annotations

import pytest

from support.strategies.block_histories import ReferenceCache, conversations, hits_of
from trencadis_gallery.config import SlruConfig
from trencadis_gallery.eviction.slru import Slru
from trencadis_testing.eviction import EvictionConformance


class TestSlru(EvictionConformance):
    make = Slru


class TestSlruWithFewProtected(EvictionConformance):
    def make(self) -> Slru:
        return Slru(SlruConfig(protected_ratio=0.3))


class Reference(ReferenceCache):
    """Two lists from oldest to newest."""

    def __init__(self, capacity: int, ratio: float) -> None:
        super().__init__(capacity)
        self.most = ratio * capacity
        self.probation: list[int] = []
        self.protected: list[int] = []

    def use(self, content: int, now_s: float) -> None:
        known = content in self.probation or content in self.protected
        for segment in (self.probation, self.protected):
            if content in segment:
                segment.remove(content)
        (self.protected if known else self.probation).append(content)

    def evict_one(self) -> int:
        while len(self.protected) > self.most:
            self.probation.append(self.protected.pop(0))
        return (self.probation or self.protected).pop(0)


@pytest.mark.representatives(4)
@pytest.mark.parametrize("ratio", [1.0, 0.8, 0.0])
@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_two_lists(seed: int, ratio: float) -> None:
    requests = conversations(seed)
    wanted = Reference(30, ratio).hits(requests)
    assert hits_of(lambda: Slru(SlruConfig(protected_ratio=ratio)), requests, 30) == wanted > 0


def test_block_used_twice_outlives_a_newer_one_used_once() -> None:
    slru = Slru()
    slru.on_use([1], keys=[b"1"], depths=[0], salt="", now_s=0.0)
    slru.on_use([1], keys=[b"1"], depths=[0], salt="", now_s=1.0)
    slru.on_free([1], depths=[0], now_s=1.0)
    slru.on_free([2], depths=[0], now_s=2.0)
    assert slru.victims(2) == [2, 1]
