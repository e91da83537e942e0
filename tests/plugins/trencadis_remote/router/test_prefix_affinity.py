from __future__ import annotations

import pytest

from trencadis_remote.router.config import PrefixAffinityConfig
from trencadis_remote.router.prefix_affinity import PrefixAffinity
from trencadis_testing import RouterConformance
from trencadis_testing.router import replica_views, routing_request

REQUEST = routing_request()  # ten blocks


class TestPrefixAffinity(RouterConformance):
    make = PrefixAffinity


def test_the_replica_with_most_of_the_prompt_takes_it() -> None:
    router = PrefixAffinity()
    assert router.peek(REQUEST, replica_views([2, 2, 2], hit_blocks=[3, 9, 0])) == 1
    assert router.peek(REQUEST, replica_views([2, 2, 2], hit_blocks=[3, 9, 0], is_healthy=[True, False, True])) == 0


@pytest.mark.parametrize(
    ("num_live", "hit_blocks", "expected"),
    [
        ([4, 2], [10, 0], 0),  # costs 4/3 - 2 and 2/3
        ([4, 2], [2, 0], 1),  # costs 4/3 - 2/5 and 2/3
        ([1, 0], [1, 0], 1),  # mean taken as 1: costs 1 - 1/5 and 0
        ([1, 0], [10, 0], 0),
    ],
)
def test_load_counts_against_the_share_of_the_prompt(num_live: list[int], hit_blocks: list[int], expected: int) -> None:
    assert PrefixAffinity().peek(REQUEST, replica_views(num_live, hit_blocks=hit_blocks)) == expected


@pytest.mark.parametrize(("loads", "expected"), [((40, 5), 1), ((30, 5), 0), ((120, 85), 0)])
def test_prefixes_do_not_count_while_loads_are_imbalanced(loads: tuple[int, int], expected: int) -> None:
    # (120, 85) differ by 35 > 32, and by less than half; (30, 5) by 25.
    router = PrefixAffinity(PrefixAffinityConfig(prefix_weight=100.0))
    assert router.peek(REQUEST, replica_views(loads, hit_blocks=[10, 0])) == expected


def test_without_hashes_it_is_the_least_loaded_one() -> None:
    request = routing_request(has_hashes=False)
    router = PrefixAffinity()
    assert [router.select(request, replica_views([1, 0, 0])) for _ in range(3)] == [1, 2, 1]


def test_equals_take_turns() -> None:
    router = PrefixAffinity()
    assert [router.select(REQUEST, replica_views([0, 0, 0])) for _ in range(4)] == [0, 1, 2, 0]
