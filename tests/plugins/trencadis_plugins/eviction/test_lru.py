from __future__ import annotations

from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.eviction import EvictionConformance


class TestLru(EvictionConformance):
    make = Lru


def freed(*groups):
    lru = Lru()
    for now_s, blocks in enumerate(groups):
        lru.on_free(blocks, depths=list(range(len(blocks)))[::-1], now_s=float(now_s))
    return lru


def test_sequence_freed_first_goes_first_as_a_whole_and_its_tail_before_its_head():
    lru = freed([2, 1], [4, 3])
    assert lru.victims(3) == [2, 1, 4]
    assert lru.victims(1) == [3]


def test_block_freed_again_is_one_candidate_at_its_later_place():
    assert freed([1, 2], [1]).victims(2) == [2, 1]
    lru = freed([3, 2, 1])
    lru.on_hit([1], now_s=1.0)
    lru.on_free([4], depths=[0], now_s=2.0)
    lru.on_free([1], depths=[0], now_s=3.0)
    lru.forget([99])
    assert lru.victims(4) == [3, 2, 4, 1]
