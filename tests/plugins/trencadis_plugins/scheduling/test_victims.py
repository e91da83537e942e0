from __future__ import annotations

import numpy as np
import pytest

from trencadis_plugins.scheduling.config import FcfsConfig
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_plugins.scheduling.victims import VICTIMS, largest

CANDIDATES = np.array([4, 0, 6, 2], np.int32)


@pytest.fixture
def view(view_of):
    return view_of(
        running=CANDIDATES,
        num_computed_tokens={4: 90, 0: 40, 6: 50, 2: 300},
        num_cached_tokens={4: 80, 0: 0, 6: 16, 2: 280},
        priority={4: 1, 0: 5, 6: 5, 2: 0},
        arrival_s={4: 3, 0: 2, 6: 1, 2: 0},
    )


@pytest.mark.parametrize(
    ("name", "victim"), [("youngest", 2), ("least_computed", 0), ("cheapest", 4), ("lowest_priority", 0)]
)
def test_each_choice_by_its_definition(view, name, victim):
    """Cheapest: 90 - 80, 40 - 0, 50 - 16 and 300 - 280 tokens would be computed again."""
    assert VICTIMS[name](view, CANDIDATES) == victim
    assert Fcfs(FcfsConfig(victim=name)).victim(view, candidates=CANDIDATES) == victim


def test_cheapest_prices_a_swap_by_what_is_copied_where_the_host_has_room(view_of):
    """Recomputed: 60, 100 and 48 - 32 tokens; swapped: 0.15 of 60, 100 and 48, and 4, 7 and 3 blocks are needed for that."""
    facts = {"num_computed_tokens": {0: 60, 1: 100, 2: 48}, "num_cached_tokens": {2: 32}}
    candidates = np.array([0, 1, 2], np.int32)
    chosen = {
        room: VICTIMS["cheapest"](view_of(running=[0, 1, 2], num_free_host_blocks=room, **facts), candidates)
        for room in (0, 3, 4, 100)
    }
    assert chosen == {0: 2, 3: 2, 4: 2, 100: 2}
    dear = {**facts, "num_cached_tokens": {}, "num_computed_tokens": {0: 60, 1: 100, 2: 70}}
    chosen = {
        room: VICTIMS["cheapest"](view_of(running=[0, 1, 2], num_free_host_blocks=room, **dear), candidates)
        for room in (0, 3, 4, 5, 7)
    }
    assert chosen == {0: 0, 3: 0, 4: 0, 5: 0, 7: 0}
    whole = {"num_computed_tokens": {0: 30, 1: 100, 2: 20}, "num_cached_tokens": {0: 20, 1: 96}}
    assert VICTIMS["cheapest"](view_of(running=[0, 1, 2], **whole), candidates) == 1
    assert VICTIMS["cheapest"](view_of(running=[0, 1, 2], num_free_host_blocks=2, **whole), candidates) == 2


@pytest.mark.parametrize("name", ["youngest", "least_computed", "cheapest"])
def test_among_equals_the_youngest_is_chosen(view_of, name):
    assert VICTIMS[name](view_of(running=CANDIDATES), CANDIDATES) == 2


def test_largest_returns_the_last_of_equals():
    assert largest(np.array([3, 9, 9, 1]), CANDIDATES) == 6


def test_unknown_choice_is_refused_by_name():
    with pytest.raises(ValueError, match="victim"):
        FcfsConfig(victim="oldest")
