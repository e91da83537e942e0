from __future__ import annotations

import pytest

from support.strategies.block_histories import conversations, hits_of
from trencadis_plugins.eviction.config import TtlConfig
from trencadis_plugins.eviction.lru import Lru
from trencadis_plugins.eviction.ttl import Ttl
from trencadis_testing.eviction import EvictionConformance


class TestTtl(EvictionConformance):
    make = Ttl


class TestTtlWithPins(EvictionConformance):
    def make(self) -> Ttl:
        return Ttl(TtlConfig(pinned_salts=("tenant 1",), pinned_blocks=2, pinned_s=3.0))


def ttl(*, blocks: int = 0) -> Ttl:
    return Ttl(TtlConfig(pinned_salts=("bot",), pinned_blocks=blocks, pinned_s=60.0))


def freed(policy: Ttl, blocks: list[int], salt: str, now_s: float) -> None:
    depths = list(range(len(blocks)))
    policy.on_use(blocks, keys=[bytes([block]) for block in blocks], depths=depths, salt=salt, now_s=now_s)
    policy.on_free(blocks[::-1], depths=depths[::-1], now_s=now_s)


@pytest.mark.parametrize("seed", range(3))
def test_without_pins_hits_are_those_of_lru(seed: int) -> None:
    requests = conversations(seed)
    assert hits_of(Ttl, requests, 30) == hits_of(Lru, requests, 30) > 0


def test_pinned_prefix_outlives_newer_blocks() -> None:
    policy = ttl()
    freed(policy, [1, 2], "bot", 0.0)
    freed(policy, [3, 4], "other", 50.0)
    assert policy.victims(4) == [4, 3, 2, 1]


def test_pinned_prefix_that_expired_goes_by_its_last_use() -> None:
    policy = ttl()
    freed(policy, [3], "other", 5.0)
    freed(policy, [1, 2], "bot", 10.0)
    freed(policy, [4], "other", 70.0)
    assert policy.victims(4) == [3, 2, 1, 4]


def test_use_starts_the_time_anew() -> None:
    policy = ttl()
    freed(policy, [1], "bot", 0.0)
    policy.on_hit([1], now_s=50.0)
    policy.on_free([1], depths=[0], now_s=55.0)
    freed(policy, [2], "other", 110.0)
    assert policy.victims(1) == [2]


def test_only_the_first_blocks_are_pinned() -> None:
    policy = ttl(blocks=2)
    freed(policy, [1, 2, 3], "bot", 0.0)
    freed(policy, [4], "other", 1.0)
    assert policy.victims(4) == [3, 4, 2, 1]


@pytest.mark.parametrize(
    ("salt", "is_pinned"), [("bot", True), ("bot/ann", True), ("bot\0mine", True), ("robot", False), ("bots", False)]
)
def test_a_name_pins_its_own_salt_and_those_under_it(salt: str, is_pinned: bool) -> None:
    policy = ttl()
    freed(policy, [1], salt, 0.0)
    freed(policy, [2], "other", 1.0)
    assert policy.victims(1) == ([2] if is_pinned else [1])
