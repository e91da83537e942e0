from __future__ import annotations

from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.eviction import EvictionConformance


class TestLru(EvictionConformance):
    make = Lru


def test_tail_of_a_sequence_goes_before_its_head():
    lru = Lru()
    lru.on_free([30, 20, 10], depths=[2, 1, 0], now_s=0.0)
    assert lru.victims(3) == [30, 20, 10]


def test_sequence_freed_first_goes_first_as_a_whole():
    lru = Lru()
    lru.on_free([2, 1], depths=[1, 0], now_s=0.0)
    lru.on_free([4, 3], depths=[1, 0], now_s=1.0)
    assert lru.victims(3) == [2, 1, 4]
    assert lru.victims(1) == [3]


def test_hit_makes_a_block_the_newest_once_it_is_freed_again():
    lru = Lru()
    lru.on_free([3, 2, 1], depths=[2, 1, 0], now_s=0.0)
    lru.on_hit([1], now_s=1.0)
    lru.on_free([4], depths=[0], now_s=2.0)
    lru.on_free([1], depths=[0], now_s=3.0)
    assert lru.victims(4) == [3, 2, 4, 1]


def test_block_freed_twice_is_one_candidate_at_its_later_place():
    lru = Lru()
    lru.on_free([1, 2], depths=[1, 0], now_s=0.0)
    lru.on_free([1], depths=[1], now_s=1.0)
    assert lru.victims(2) == [2, 1]


def test_forgetting_an_unknown_block_changes_nothing():
    lru = Lru()
    lru.on_free([1], depths=[0], now_s=0.0)
    lru.forget([99])
    assert lru.victims(1) == [1]
