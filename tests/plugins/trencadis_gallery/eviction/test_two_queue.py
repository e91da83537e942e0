from __future__ import annotations

import pytest

from support.strategies.block_histories import ReferenceCache, conversations, hits_of
from trencadis_gallery.config import TwoQueueConfig
from trencadis_gallery.eviction.two_queue import TwoQueue
from trencadis_testing.eviction import EvictionConformance


class TestTwoQueue(EvictionConformance):
    make = TwoQueue


class Reference(ReferenceCache):
    """A1in, A1out and Am of the paper, as lists."""

    def __init__(self, capacity: int, new_ratio: float, history: float) -> None:
        super().__init__(capacity)
        self.most_in, self.most_out = int(capacity * new_ratio), int(capacity * history)
        self.a1_in: list[int] = []
        self.a1_out: list[int] = []
        self.a_m: list[int] = []

    def use(self, content: int, now_s: float) -> None:
        if content in self.a_m:
            self.a_m.remove(content)
            self.a_m.append(content)
        elif content in self.a1_out:
            self.a1_out.remove(content)
            self.a_m.append(content)
        elif content not in self.a1_in:
            self.a1_in.append(content)

    def evict_one(self) -> int:
        if len(self.a1_in) > self.most_in or not self.a_m:
            content = self.a1_in.pop(0)
            self.a1_out = [*self.a1_out, content][-self.most_out :] if self.most_out else []
            return content
        return self.a_m.pop(0)


@pytest.mark.representatives(4)
@pytest.mark.parametrize(("new_ratio", "history"), [(0.25, 0.5), (0.1, 3.0), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_the_papers_queues(seed: int, new_ratio: float, history: float) -> None:
    requests = conversations(seed)
    wanted = Reference(30, new_ratio, history).hits(requests)
    config = TwoQueueConfig(new_ratio=new_ratio, history=history)
    assert hits_of(lambda: TwoQueue(config), requests, 30) == wanted > 0


def test_block_in_use_keeps_its_place_among_the_new() -> None:
    policy = TwoQueue(TwoQueueConfig(new_ratio=1.0))
    for block in (1, 2):
        policy.on_use([block], keys=[bytes([block])], depths=[0], salt="", now_s=0.0)
        policy.on_free([block], depths=[0], now_s=0.0)
    policy.on_hit([1], now_s=1.0)
    policy.on_use([1], keys=[b"\x01"], depths=[0], salt="", now_s=1.0)
    policy.on_free([1], depths=[0], now_s=2.0)
    assert policy.victims(2) == [1, 2]
