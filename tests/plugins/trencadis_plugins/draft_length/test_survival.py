from __future__ import annotations

import numpy as np
import pytest

from trencadis_plugins.draft_length.survival import Survival

ONE = np.array([0], np.int32)
FIRST = np.array([1], np.int64)


def ints(*values):
    return np.array(values, np.int32)


def told(survival, drafts, accepted, times=1, slots=ONE, epochs=FIRST):
    for _ in range(times):
        survival.add(slots, epochs, num_drafts=ints(*drafts), num_accepted=ints(*accepted))
    return survival


def test_nothing_known_is_a_half_at_every_position():
    assert Survival().of(ONE, FIRST, 3).tolist() == [[0.5, 0.25, 0.125]]


def test_a_verdict_counts_as_the_definition_says():
    """Three drafts, one stands: the first was tried and stood, the second was tried and fell, of the third nothing is known."""
    found = told(Survival(prior_weight=2), [3], [1]).of(ONE, FIRST, 3)
    prior = [(1 + 4 * 0.5) / 5, (4 * 0.6) / 5, 0.48]
    chance = [(1 + 2 * prior[0]) / 3, (2 * prior[1]) / 3, prior[2]]
    assert found.tolist() == [pytest.approx(np.cumprod(chance).tolist())]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_acceptance_comes_near_the_share_that_stands(share):
    rng, survival = np.random.default_rng(5), Survival()
    estimates = []
    for _ in range(800):
        told(survival, [1], [int(rng.random() < share)])
        estimates.append(survival.of(ONE, FIRST, 1)[0, 0])
    assert np.mean(estimates[200:]) == pytest.approx(share, abs=0.03)


def test_old_verdicts_fade():
    survival = told(told(Survival(), [1], [1], times=200), [1], [0], times=20)
    assert survival.of(ONE, FIRST, 1)[0, 0] < 0.3


def test_survivals_fall_and_stay_inside_0_and_1():
    survival = told(Survival(), [8], [8], times=500)
    found = survival.of(ONE, FIRST, 8)[0]
    assert (np.diff(found) < 0).all()
    assert 0.9 < found[-1] < found[0] < 1
    found = told(survival, [8], [0], times=500).of(ONE, FIRST, 8)[0]
    assert 0 < found[-1] < found[0] < 0.01


def test_a_new_sequence_starts_with_what_is_known_of_all():
    survival = told(Survival(), [2], [0], times=100)
    assert survival.of(ints(3), FIRST, 2)[0, 0] < 0.06


def test_sequences_are_kept_apart():
    slots, epochs = ints(0, 1), np.ones(2, np.int64)
    survival = told(Survival(), [1, 1], [1, 0], times=50, slots=slots, epochs=epochs)
    good, bad = survival.of(slots, epochs, 1)[:, 0].tolist()
    assert good > 0.9
    assert bad < 0.1


@pytest.mark.parametrize("by_epoch", [True, False])
def test_a_sequence_is_forgotten_by_its_epoch_or_by_its_end(by_epoch):
    survival = told(Survival(), [1], [1], times=30)
    if by_epoch:
        again = survival.of(ONE, FIRST + 1, 1)
    else:
        survival.forget(0)
        again = survival.of(ONE, FIRST, 1)
    assert again.tolist() == survival.of(ints(9), FIRST, 1).tolist()


def test_faded_verdicts_give_way_to_one_new_one():
    kept, faded = (told(Survival(), [1], [0], times=100) for _ in range(2))
    faded.fade(ONE, 0.25)
    assert told(faded, [1], [1]).of(ONE, FIRST, 1)[0, 0] > 1.5 * told(kept, [1], [1]).of(ONE, FIRST, 1)[0, 0]


def test_forgetting_somebody_unknown_does_nothing():
    Survival().forget(12)
