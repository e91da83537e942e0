from __future__ import annotations

import pytest

from support.strategies.block_histories import ReferenceCache, conversations, hits_of
from trencadis_gallery.eviction.arc import Arc
from trencadis_testing.eviction import EvictionConformance


class TestArc(EvictionConformance):
    make = Arc


class Reference(ReferenceCache):
    """T1, T2, B1, B2 and p of the paper, as lists; lots are evicted, and ghosts trimmed, after a request."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def hits(self, requests: list) -> int:  # type: ignore[type-arg]
        """Move the border in chain order, before blocks join the lists in the order in which they are freed."""
        num_hits = 0
        for request in requests:
            cached = {*self.t1, *self.t2}
            for content in request.contents:
                if content not in cached:
                    break
                num_hits += 1
            again = {content for content in request.contents if content in cached or self.was_remembered(content)}
            for content in reversed(request.contents):
                for segment in (self.t1, self.t2):
                    if content in segment:
                        segment.remove(content)
                (self.t2 if content in again else self.t1).append(content)
            for _ in range(len(self.t1) + len(self.t2) - self.capacity):
                self.evict_one()
        return num_hits

    def was_remembered(self, content: int) -> bool:
        sizes = len(self.b1), len(self.b2)
        if content in self.b1:
            self.b1.remove(content)
            self.p = min(self.capacity, self.p + max(1.0, sizes[1] / sizes[0]))
        elif content in self.b2:
            self.b2.remove(content)
            self.p = max(0.0, self.p - max(1.0, sizes[0] / sizes[1]))
        else:
            return False
        return True

    def evict_one(self) -> int:
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            content = self.t1.pop(0)
            self.b1.append(content)
        else:
            content = self.t2.pop(0)
            self.b2.append(content)
        while len(self.t1) + len(self.b1) > self.capacity and self.b1:
            self.b1.pop(0)
        while len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.capacity and self.b2:
            self.b2.pop(0)
        return content


@pytest.mark.representatives(3)
@pytest.mark.parametrize("capacity", [10, 30, 100])
@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_the_papers_lists(seed: int, capacity: int) -> None:
    requests = conversations(seed, num_requests=600)
    assert hits_of(Arc, requests, capacity) == Reference(capacity).hits(requests) > 0


def test_block_used_twice_outlives_newer_ones_used_once() -> None:
    arc = Arc()
    for now_s in (0.0, 1.0):
        arc.on_use([1], keys=[b"1"], depths=[0], salt="", now_s=now_s)
    arc.on_free([1], depths=[0], now_s=1.0)
    arc.on_free([2, 3], depths=[0, 0], now_s=2.0)
    assert arc.victims(3) == [2, 3, 1]
