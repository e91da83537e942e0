"""Draws are a function of their keys, so each test below draws the same numbers on every machine; errors are four standard errors."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis_tools.workloads.distributions import Distribution
from trencadis_tools.workloads.draws import (
    Stream,
    categories,
    exponentials,
    gammas,
    geometrics,
    keyed_hash,
    normals,
    uniforms,
    zipf_shares,
)

NUM = 40_000
KEYS = np.arange(NUM)


def near(values: np.ndarray, mean: float) -> bool:
    return abs(values.mean() - mean) < 4 * values.std() / np.sqrt(len(values))


def test_a_draw_depends_on_its_keys_alone() -> None:
    draw = uniforms(7, Stream.PROMPTS, KEYS)
    assert np.array_equal(uniforms(7, Stream.PROMPTS, KEYS[:100]), draw[:100])
    assert uniforms(7, Stream.PROMPTS, 31) == draw[31]
    for others in (
        uniforms(8, Stream.PROMPTS, KEYS),
        uniforms(7, Stream.OUTPUTS, KEYS),
        uniforms(7, Stream.PROMPTS, KEYS, 0),
    ):
        assert abs(np.corrcoef(draw, others)[0, 1]) < 4 / np.sqrt(NUM)


def test_hashes_stay_what_they_are() -> None:
    """A seed means these numbers: workloads of published results are drawn from them."""
    assert keyed_hash(0).item() == 0xE220A8397B1DCDAF, "the first number of SplitMix64 from state 0"
    assert [int(one) for one in keyed_hash(1, 2, np.array([0, 3, 2**64 - 1], np.uint64))] == [
        0x508AFB8E036D2294,
        0x27D1DADE99DDF6A4,
        0xEE3A874681EA1B6A,
    ]


def test_uniform_numbers_fill_the_open_interval_evenly() -> None:
    draw = uniforms(0, Stream.GAPS, KEYS)
    assert 0 < draw.min() < draw.max() < 1
    counts = np.histogram(draw, 20, (0, 1))[0]
    assert ((counts - NUM / 20) ** 2 / (NUM / 20)).sum() < 43.8, "chi squared of 19 degrees of freedom, p = .001"


def test_exponential_and_normal_numbers_have_their_moments() -> None:
    draw = exponentials(0, Stream.GAPS, KEYS)
    assert near(draw, 1.0)
    assert near((draw - 1) ** 2, 1.0)
    draw = normals(0, Stream.GAPS, KEYS)
    assert near(draw, 0.0)
    assert near(draw**2, 1.0)
    assert near(draw**4, 3.0)


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0, 13.0])
def test_gamma_numbers_have_mean_one_and_the_variance_asked_for(cv: float) -> None:
    draw = gammas(0, Stream.GAPS, KEYS, shape=1 / cv**2)
    assert near(draw, 1.0)
    assert near((draw - 1) ** 2, cv**2)
    assert np.array_equal(gammas(0, Stream.GAPS, KEYS[:50], shape=1 / cv**2), draw[:50])


@pytest.mark.parametrize("mean", [1.0, 3.95, 30.0])
def test_geometric_numbers_begin_at_one_and_have_their_mean_and_variance(mean: float) -> None:
    draw = geometrics(0, Stream.TURNS, KEYS, mean=mean)
    assert draw.min() == 1
    assert mean == 1 or near(draw, mean)
    assert mean == 1 or near((draw - mean) ** 2, mean**2 - mean)


def test_categories_come_in_proportion_to_their_shares() -> None:
    shares = zipf_shares(4, 1.0)
    assert shares == pytest.approx(np.array([12, 6, 4, 3]) / 25)
    drawn = categories(uniforms(0, Stream.TENANTS, KEYS), shares)
    for category, share in enumerate(shares):
        assert near((drawn == category).astype(float), share)
    assert categories(np.array([1.0]), [1, 9]).tolist() == [1]
    assert categories(np.array([0.05, 0.15]), [1, 9]).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("distribution", "mean", "cv"),
    [
        (Distribution(mean=7.0), 7.0, 0.0),
        (Distribution(kind="uniform", min=2.0, max=8.0), 5.0, np.sqrt(3) / 5),
        (Distribution(kind="exponential", mean=30.0), 30.0, 1.0),
        (Distribution(kind="lognormal", mean=1000.0, cv=0.7), 1000.0, 0.7),
        (Distribution(kind="zipf", mean=2.0, exponent=1.0), 2.0, np.sqrt((36 / 11) / (18 / 11) ** 2 - 1)),
    ],
)
def test_distributions_have_their_mean_and_variation(distribution, mean, cv) -> None:
    draw = distribution.draw(0, Stream.PROMPTS, KEYS, 5)
    assert draw.shape == KEYS.shape
    assert draw.mean() == pytest.approx(mean) if not cv else near(draw, mean)
    assert (draw.std() == 0) if not cv else near((draw - mean) ** 2, (cv * mean) ** 2)


def test_numbers_beyond_the_limits_become_the_limits_and_tokens_are_whole() -> None:
    draw = Distribution(kind="lognormal", mean=100.0, cv=2.0, min=20, max=150).draw_tokens(0, Stream.PROMPTS, KEYS)
    assert (draw.min(), draw.max()) == (20, 150)
    assert draw.dtype == np.int64
    assert Distribution(mean=0.2).draw_tokens(0, Stream.PROMPTS, 3) == 1, "no request without a token"


@pytest.mark.parametrize("wrong", [{"min": 9.0, "max": 3.0}, {"kind": "uniform"}])
def test_limits_that_contradict_each_other_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="max"):
        Distribution(mean=5.0, **wrong)
