"""Times of buckets: those measured, and those between."""

from __future__ import annotations

import pytest

from trencadis.records import Bucket, Phase, StepShape, UnifiedBucket
from trencadis_tools.simulation.step_times import BucketStepTimes

DECODES = {
    Bucket(rows, 1, blocks, Phase.DECODE): 1e-3 + 2e-5 * rows + 1e-6 * blocks
    for rows in (4, 16)
    for blocks in (32, 256)
}
PREFILLS = {Bucket(1, 128, 0): 5e-3, Bucket(2, 256, 16): 9e-3}
TIMES = BucketStepTimes(
    times_s=DECODES | PREFILLS,
    lines={Phase.DECODE: (1e-3, 2e-5, 1e-6), Phase.PREFILL: (0.0, 1e-5, 0.0)},
    host_base_s=1e-4,
)


def test_a_step_takes_the_sum_of_its_buckets():
    decode, prefill = Bucket(4, 1, 32, Phase.DECODE), Bucket(1, 128, 0)
    shape = StepShape(
        num_decodes=3, num_decode_tokens=3, num_prefills=1, num_prefill_tokens=99, buckets=(prefill, decode)
    )
    assert TIMES.device_s(shape) == pytest.approx(5e-3 + DECODES[decode])
    assert TIMES.host_s(shape) == 1e-4


def test_a_bucket_between_measured_ones_follows_the_line_through_them():
    assert TIMES.bucket_s(Bucket(8, 1, 128, Phase.DECODE)) == pytest.approx(1e-3 + 2e-5 * 8 + 1e-6 * 128)


def test_beside_the_line_the_nearest_measured_bucket_decides():
    # 128 positions take 5 ms although the line says 1.28 ms; 160 positions are nearest to them.
    assert TIMES.bucket_s(Bucket(1, 160, 0)) == pytest.approx(5e-3 * 160 / 128)


@pytest.mark.parametrize("bucket", [UnifiedBucket(8, 4, 2, True), Bucket(4, 1, 32, Phase.DECODE)])
def test_a_phase_that_was_never_measured_has_no_time(bucket):
    other = Phase.DECODE if bucket.phase is Phase.PREFILL else Phase.PREFILL
    times = BucketStepTimes(times_s={Bucket(1, 1, 1, other): 1e-3}, lines={other: (0.0, 0.0, 0.0)})
    with pytest.raises(ValueError, match="was measured"):
        times.bucket_s(bucket)


def test_a_step_without_buckets_has_no_time():
    with pytest.raises(ValueError, match="no buckets"):
        TIMES.device_s(StepShape(num_decodes=1, num_decode_tokens=1))


@pytest.mark.parametrize("times_s", [{}, {Bucket(1, 1, 1): 0.0}, {Bucket(1, 1, 1): float("nan")}])
def test_tables_without_a_time_are_refused(times_s):
    with pytest.raises(ValueError, match="times_s"):
        BucketStepTimes(times_s=times_s, lines={})
