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


@pytest.mark.parametrize("name", ["youngest", "least_computed", "cheapest"])
def test_among_equals_the_youngest_is_chosen(view_of, name):
    assert VICTIMS[name](view_of(running=CANDIDATES), CANDIDATES) == 2


def test_largest_returns_the_last_of_equals():
    assert largest(np.array([3, 9, 9, 1]), CANDIDATES) == 6


def test_unknown_choice_is_refused_by_name():
    with pytest.raises(ValueError, match="victim"):
        FcfsConfig(victim="oldest")
