"""Fits of synthetic steps whose coefficients are known."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from support.step_records import TRUE, shapes, steps_of
from trencadis.errors import ConfigError
from trencadis.records import Bucket, Phase, StepShape
from trencadis_tools.simulation.step_times import BucketStepTimes, StepRecord, fit_step_times
from trencadis_tools.simulation.step_times.fit import DEVICE_SIZES, HOST_SIZES

NAMES = [*DEVICE_SIZES, *HOST_SIZES]


def test_steps_without_noise_give_the_coefficients_that_made_them():
    fit = fit_step_times(steps_of(TRUE, shapes(300)))
    for name in NAMES:
        assert getattr(fit.times, name) == pytest.approx(getattr(TRUE, name), rel=1e-9), name
    assert (fit.num_steps, fit.num_outliers) == (300, 0)


def test_coefficients_of_noisy_steps_are_within_four_standard_errors():
    fit = fit_step_times(steps_of(TRUE, shapes(2000), noise=0.03))
    for name in NAMES:
        found = fit.coefficients[name]
        assert 0 < found.error < 0.25 * getattr(TRUE, name), name
        assert abs(found.value - getattr(TRUE, name)) < 4 * found.error, name


def test_steps_that_something_else_slowed_down_have_no_weight():
    rng = np.random.default_rng(5)
    steps = [
        attrs.evolve(step, device_s=slow * step.device_s, wall_s=step.wall_s + (slow - 1) * step.device_s)
        for step in steps_of(TRUE, shapes(2000), noise=0.02)
        for slow in [1.3 + rng.exponential(2.0) if rng.random() < 0.2 else 1.0]
    ]
    fit = fit_step_times(steps)
    assert 350 < fit.num_outliers < 500
    sizes = StepShape(num_decodes=16, num_decode_tokens=16, num_decode_context=8000)
    assert fit.times.device_s(sizes) == pytest.approx(TRUE.device_s(sizes), rel=0.01)


def test_no_coefficient_is_below_zero():
    times = attrs.evolve(TRUE, context_s=0.0, row_s=0.0)
    fit = fit_step_times(steps_of(times, shapes(500), noise=0.05))
    assert all(getattr(fit.times, name) >= 0 for name in NAMES)


def test_what_is_left_out_is_zero_and_the_rest_is_fitted():
    times = attrs.evolve(TRUE, row_s=0.0, product_s=0.0)
    fit = fit_step_times(steps_of(times, shapes(300)), leave_out=["row_s", "product_s"])
    assert (fit.times.row_s, fit.times.product_s) == (0.0, 0.0)
    assert fit.times.token_s == pytest.approx(TRUE.token_s, rel=1e-9)
    assert "row_s" not in fit.coefficients


def test_too_few_steps_are_refused_with_the_number_that_is_needed():
    with pytest.raises(ConfigError, match=r"49 steps are too few to fit 5 coefficients") as caught:
        fit_step_times(steps_of(TRUE, shapes(49)), source="steps.jsonl")
    assert "50 steps" in str(caught.value.hint)


def _decodes(num_steps):
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        rows = int(rng.integers(1, 30))
        context = int(rng.integers(1, 900, rows).sum())
        yield StepShape(num_decodes=rows, num_decode_tokens=rows, num_decode_context=context, num_new=int(rows > 20))


def test_sizes_that_no_step_has_are_named():
    with pytest.raises(ConfigError, match=r"no step has a size for product_s"):
        fit_step_times(steps_of(TRUE, _decodes(200)))


def test_sizes_in_proportion_to_each_other_are_named():
    with pytest.raises(ConfigError, match=r"do not tell token_s and row_s apart") as caught:
        fit_step_times(steps_of(TRUE, _decodes(200)), leave_out=["product_s"])
    assert "--leave-out" in str(caught.value.hint)
    fit = fit_step_times(steps_of(TRUE, _decodes(200)), leave_out=["product_s", "row_s"])
    assert fit.times.token_s == pytest.approx(TRUE.token_s + TRUE.row_s, rel=1e-9)


def test_a_coefficient_that_does_not_exist_is_not_left_out():
    with pytest.raises(ConfigError, match=r"no coefficient rows"):
        fit_step_times(steps_of(TRUE, shapes(300)), leave_out=["rows"])


PREFILL, DECODE, LARGER = Bucket(1, 128, 0), Bucket(8, 1, 64, Phase.DECODE), Bucket(16, 1, 128, Phase.DECODE)


def _in_buckets(*buckets, device_s, host_s=1e-4):
    shape = StepShape(
        num_decodes=1,
        num_decode_tokens=1,
        num_decode_context=1,
        num_new=sum(b.batch_size % 3 for b in buckets),
        buckets=buckets,
    )
    return StepRecord(shape=shape, now_s=0.0, wall_s=device_s + host_s, device_s=device_s)


def test_a_bucket_has_the_median_of_its_steps_and_one_that_was_never_alone_what_the_others_leave():
    decodes = [_in_buckets(DECODE, device_s=time_s) for time_s in (2e-3, 2.1e-3, 9e-3) for _ in range(5)]
    mixed = [_in_buckets(PREFILL, DECODE, device_s=5.1e-3) for _ in range(10)]
    larger = [_in_buckets(LARGER, device_s=3e-3) for _ in range(15)]
    fit = fit_step_times(decodes + mixed + larger, by_bucket=True, leave_out=["host_row_s", "host_new_s"])
    assert isinstance(fit.times, BucketStepTimes)
    assert fit.times.times_s == pytest.approx({DECODE: 2.1e-3, PREFILL: 3e-3, LARGER: 3e-3})
    assert fit.times.host_base_s == pytest.approx(1e-4, rel=1e-6)


def test_steps_without_buckets_have_no_table():
    with pytest.raises(ConfigError, match=r"no step has a bucket"):
        fit_step_times(steps_of(TRUE, shapes(300)), by_bucket=True)


def test_with_all_steps_the_sum_over_the_run_is_that_which_was_measured():
    rng = np.random.default_rng(6)
    steps = [
        attrs.evolve(step, device_s=3 * step.device_s if rng.random() < 0.1 else step.device_s)
        for step in steps_of(TRUE, shapes(2000))
    ]
    measured_s = sum(step.device_s for step in steps)
    every, typical = fit_step_times(steps, robust=False), fit_step_times(steps)
    assert sum(every.times.device_s(step.shape) for step in steps) == pytest.approx(measured_s, rel=1e-6)
    typical_s = sum(TRUE.device_s(step.shape) for step in steps)
    assert sum(typical.times.device_s(step.shape) for step in steps) == pytest.approx(typical_s, rel=1e-6)
    assert every.num_outliers == 0
