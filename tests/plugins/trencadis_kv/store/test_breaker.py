from __future__ import annotations

import pytest

from trencadis.clock import SimulatedClock
from trencadis.records import TransferCause
from trencadis_kv.store.breaker import BREAKING_CAUSES, Breaker, BreakerState


@pytest.fixture
def clock():
    return SimulatedClock(100.0)


@pytest.fixture
def breaker(clock):
    return Breaker(clock, name="shelf", failure_limit=3, failure_window_s=10.0, cooldown_s=5.0)


def fail(breaker, number, cause=TransferCause.UNREACHABLE):
    for _ in range(number):
        breaker.failed(cause)


def test_breaker_opens_with_the_last_failure_of_the_limit(breaker):
    fail(breaker, 2)
    assert breaker.allows
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN


@pytest.mark.parametrize(("apart_s", "allows"), [(5.1, True), (5.0, False)])
def test_failures_count_that_lie_within_the_window(breaker, clock, apart_s, allows):
    for _ in range(3):
        fail(breaker, 1)
        clock.advance(apart_s)
    assert breaker.allows == allows


@pytest.mark.parametrize("cause", TransferCause)
def test_only_failures_that_say_something_about_the_store_count(breaker, cause):
    fail(breaker, 10, cause)
    everyday = {TransferCause.EVICTED, TransferCause.FULL, TransferCause.CANCELLED, TransferCause.INCOMPATIBLE}
    assert breaker.allows == (cause in everyday)
    assert (cause in BREAKING_CAUSES) != (cause in everyday)


def test_one_caller_probes_once_the_cooldown_is_over(breaker, clock):
    fail(breaker, 3)
    clock.advance(4.9)
    assert not breaker.wants_probe()
    clock.advance(0.1)
    assert [breaker.wants_probe() for _ in range(3)] == [True, False, False]
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows
    clock.advance(2.0)
    assert breaker.half_open_s == 2.0


def test_probe_that_fails_starts_a_new_cooldown_and_one_that_works_forgets_the_failures(breaker, clock):
    fail(breaker, 3)
    clock.advance(4.0)
    fail(breaker, 5)  # stragglers do not prolong it
    clock.advance(1.0)
    assert breaker.wants_probe()
    clock.advance(3.0)
    breaker.probed(works=False)
    clock.advance(4.9)
    assert not breaker.wants_probe()
    clock.advance(0.1)
    assert breaker.wants_probe()
    breaker.probed(works=True)
    assert (breaker.allows, breaker.half_open_s) == (True, 0.0)
    fail(breaker, 2)
    assert breaker.allows
