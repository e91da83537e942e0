from __future__ import annotations

import pytest

from support.strategies.block_histories import ReferenceCache, conversations, hits_of
from trencadis_gallery.config import S3FifoConfig
from trencadis_gallery.eviction.s3_fifo import S3Fifo
from trencadis_testing.eviction import EvictionConformance


class TestS3Fifo(EvictionConformance):
    make = S3Fifo


class Reference(ReferenceCache):
    """Algorithm 1 of the paper over lists."""

    def __init__(self, capacity: int, small_ratio: float, history: float) -> None:
        super().__init__(capacity)
        self.most_small, self.most_ghosts = int(capacity * small_ratio), int(capacity * history)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.freq: dict[int, int] = {}

    def use(self, content: int, now_s: float) -> None:
        if content in self.freq:
            self.freq[content] = min(3, self.freq[content] + 1)
            return
        self.freq[content] = 0
        if content in self.ghosts:
            self.ghosts.remove(content)
            self.main.append(content)
        else:
            self.small.append(content)

    def evict_one(self) -> int:
        while True:
            if self.small and (len(self.small) > self.most_small or not self.main):
                content = self.small.pop(0)
                if self.freq[content] > 1:
                    self.freq[content] = 0
                    self.main.append(content)
                    continue
                self.ghosts = [*self.ghosts, content][-self.most_ghosts :] if self.most_ghosts else []
            else:
                content = self.main.pop(0)
                if self.freq[content]:
                    self.freq[content] -= 1
                    self.main.append(content)
                    continue
            del self.freq[content]
            return content


@pytest.mark.representatives(4)
@pytest.mark.parametrize(("small_ratio", "history"), [(0.1, 1.0), (0.4, 0.0), (0.0, 3.0), (1.0, 1.0)])
@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_the_papers_algorithm(seed: int, small_ratio: float, history: float) -> None:
    requests = conversations(seed)
    wanted = Reference(30, small_ratio, history).hits(requests)
    config = S3FifoConfig(small_ratio=small_ratio, history=history)
    assert hits_of(lambda: S3Fifo(config), requests, 30) == wanted > 0


def test_block_in_use_keeps_its_place_in_the_queue() -> None:
    policy = S3Fifo()
    policy.on_free([1], depths=[0], now_s=0.0)
    policy.on_free([2], depths=[0], now_s=1.0)
    policy.on_hit([1], now_s=2.0)
    policy.on_free([1], depths=[0], now_s=3.0)
    assert policy.victims(2) == [1, 2]
