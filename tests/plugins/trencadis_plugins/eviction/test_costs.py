"""Calls of every policy cost little, however many candidates there are."""

from __future__ import annotations

import time

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, EvictionPolicy
from trencadis_plugins.eviction import trencadis_eviction_policies

COMPONENTS = {component.name: component for component in trencadis_eviction_policies()}


def make(name: str) -> EvictionPolicy:
    component = COMPONENTS[name]
    policy: EvictionPolicy = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=0))
    return policy


@pytest.mark.representatives(2)
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_call_costs_hardly_more_with_sixty_times_the_candidates(name: str) -> None:
    """O(log n): a factor of two would be expected, O(n) gives sixty."""
    few, many = (min(_seconds(make(name), num_candidates) for _ in range(3)) for num_candidates in (500, 30_000))
    assert many < 12 * few


def _seconds(policy: EvictionPolicy, num_candidates: int) -> float:
    blocks = list(range(num_candidates))
    policy.on_use(blocks, keys=[b"%d" % block for block in blocks], depths=blocks, salt="", now_s=0.0)
    policy.on_free(blocks[::-1], depths=blocks[::-1], now_s=0.0)
    start_s = time.thread_time()
    for turn in range(100):
        (victim,) = policy.victims(1)
        key = b"again %d" % turn
        policy.on_use([victim], keys=[key], depths=[0], salt="", now_s=1.0)
        policy.on_free([victim], depths=[0], now_s=1.0)
        policy.on_hit([victim], now_s=1.0)
        policy.on_use([victim], keys=[key], depths=[0], salt="", now_s=1.0)
        policy.on_free([victim], depths=[0], now_s=1.0)
    return time.thread_time() - start_s
