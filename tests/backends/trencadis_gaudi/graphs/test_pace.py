from __future__ import annotations

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.clock import SimulatedClock
from trencadis_gaudi.graphs.pace import Pace


def make(**options):
    clock = SimulatedClock()
    return Pace(clock, **{"quiet_s": 1.0, "step_s": 0.0, "expected_s": 0.5, **options}), clock


def test_idle_from_the_start_and_again_when_no_step_ran_for_long_enough():
    pace, clock = make()
    assert pace.allows(is_idle=True)
    pace.stepped()
    assert not pace.allows(is_idle=True)
    clock.advance(0.99)
    assert not pace.allows(is_idle=True)
    clock.advance(0.01)
    assert pace.allows(is_idle=True)


def test_steps_give_nothing_by_default():
    pace, _ = make()
    for _ in range(100):
        pace.stepped()
    assert not pace.allows(is_idle=False)


def test_steps_save_until_a_piece_is_paid_for():
    pace, _ = make(step_s=0.2)
    allowed = []
    for _ in range(3):
        pace.stepped()
        allowed.append(pace.allows(is_idle=False))
    assert allowed == [False, False, True]
    pace.took(0.5, is_idle=False)
    assert not pace.allows(is_idle=False)


def test_idle_work_spends_nothing_that_steps_saved():
    pace, _ = make(step_s=0.5)
    pace.stepped()
    pace.took(0.4, is_idle=True)
    assert pace.allows(is_idle=False)


@settings(max_examples=50, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=20), st.floats(0.01, 0.5))
def test_work_behind_steps_takes_their_share_of_time_and_one_piece_more_at_most(pieces, step_s):
    pace, _ = make(step_s=step_s, expected_s=pieces[0])
    num_steps, spent_s, left = 0, 0.0, list(pieces)
    while left and num_steps < 1000:
        pace.stepped()
        num_steps += 1
        if pace.allows(is_idle=False):
            took_s = left.pop(0)
            pace.took(took_s, is_idle=False)
            spent_s += took_s
            # A piece may take longer than the one before: then what it took too much is not asked back.
            surprise_s = sum(max(0.0, b - a) for a, b in itertools.pairwise(pieces))
            assert spent_s <= num_steps * step_s + surprise_s + 1e-9
    assert spent_s > 0 or num_steps * step_s < pieces[0]


@pytest.mark.parametrize("is_idle", [True, False])
def test_asking_changes_nothing(is_idle):
    pace, _ = make(step_s=1.0)
    pace.stepped()
    assert pace.allows(is_idle=is_idle) == pace.allows(is_idle=is_idle)
