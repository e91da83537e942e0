from __future__ import annotations

import numpy as np
import pytest

from trencadis_remote.router.least_loaded import LeastLoaded
from trencadis_remote.router.loads import loads
from trencadis_remote.router.power_of_two import PowerOfTwo
from trencadis_remote.router.round_robin import RoundRobin
from trencadis_testing import RouterConformance
from trencadis_testing.router import replica_views, routing_request

REQUEST = routing_request()


class TestRoundRobin(RouterConformance):
    make = RoundRobin


class TestLeastLoaded(RouterConformance):
    make = LeastLoaded


class TestPowerOfTwo(RouterConformance):
    make = PowerOfTwo


def test_turns_leave_out_who_is_not_healthy() -> None:
    router, views = RoundRobin(), replica_views([9, 0, 5, 0], is_healthy=[True, False, True, True])
    assert [router.select(REQUEST, views) for _ in range(5)] == [0, 2, 3, 0, 2]


@pytest.mark.parametrize(
    ("num_live", "num_waiting", "kv_usage", "expected"),
    [
        (10, 0, 1.0, 10.0),
        (10, 4, 0.5, 10.0),
        (10, 4, 0.75, 10 + 6 * 4 * 0.25),
        (10, 4, 1.0, 10 + 6 * 4 * 0.5),
    ],
)
def test_a_load_is_vllms_score(num_live: int, num_waiting: int, kv_usage: float, expected: float) -> None:
    views = replica_views([num_live], num_waiting=[num_waiting], kv_usage=[kv_usage])
    assert loads(views).tolist() == [expected]


def test_what_a_replica_says_counts_where_it_has_more_than_was_sent_from_here() -> None:
    views = replica_views([7, 5])
    views.num_live[:] = [0, 5]
    assert LeastLoaded().peek(REQUEST, views) == 1


def test_equals_take_turns() -> None:
    router, views = LeastLoaded(), replica_views([2, 1, 1, 1])
    assert [router.select(REQUEST, views) for _ in range(4)] == [1, 2, 3, 1]


def test_the_less_loaded_of_two_is_taken_as_often_as_arithmetic_says() -> None:
    # Of 4 replicas with loads 0, 1, 2, 3 and 6 pairs: 0 wins 3, 1 wins 2, 2 wins 1, 3 none.
    router, views = PowerOfTwo(seed=3), replica_views([0, 1, 2, 3])
    num_draws = 3000
    counts = np.bincount([router.select(REQUEST, views) for _ in range(num_draws)], minlength=4)
    expected = num_draws * np.array([3, 2, 1, 0]) / 6
    # Chi-square with 2 degrees of freedom exceeds 13.8 once in 1,000 seeds; this one is fixed.
    assert ((counts - expected)[:3] ** 2 / expected[:3]).sum() < 13.8
    assert counts[3] == 0


def test_draws_depend_on_the_seed() -> None:
    views = replica_views([0] * 8)
    one, other = ([router.select(REQUEST, views) for _ in range(20)] for router in (PowerOfTwo(1), PowerOfTwo(2)))
    assert one != other
