from __future__ import annotations

import math

import pytest

from trencadis_kv.connectors.blend.scheduler import BlendShare


def test_all_tokens_go_through_the_first_layers_and_a_share_through_the_rest():
    share = BlendShare(num_layers=14)
    assert share.of(1.0) == pytest.approx(1.0)
    assert share.of(0.0) == pytest.approx(0.1)
    assert share.of(0.5) == pytest.approx(0.55)
    assert BlendShare(num_layers=1).of(0.0) == pytest.approx(1.0)


def test_prediction_comes_to_what_it_takes():
    share = BlendShare(num_layers=14)
    for _ in range(40):
        share.took(predicted_s=2.0 * share.of(0.5), seconds=2.0 * 0.8)
    assert share.of(0.5) == pytest.approx(0.8, rel=1e-3)


@pytest.mark.parametrize(("predicted", "seconds"), [(math.nan, 1.0), (0.0, 1.0), (1.0, 0.0), (math.inf, 1.0)])
def test_what_says_nothing_is_ignored(predicted, seconds):
    share = BlendShare(num_layers=14)
    share.took(predicted_s=predicted, seconds=seconds)
    assert share.of(1.0) == pytest.approx(1.0)


def test_one_odd_measurement_does_not_take_it_far():
    share = BlendShare(num_layers=14)
    share.took(predicted_s=1e-9, seconds=1e9)
    assert share.of(1.0) <= 10.0
