"""Step times of devices with static shapes: a time for each bucket, and a line between them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from trencadis.records import Bucket, Phase, StepShape, UnifiedBucket
from trencadis_tools.simulation.step_times.linear import HostTimes

__all__ = ["BucketStepTimes", "bucket_sizes"]


def bucket_sizes(bucket: Bucket) -> tuple[int, int]:
    """Return token positions and KV blocks that a pass in a bucket computes and reads. Pure."""
    if isinstance(bucket, UnifiedBucket):
        return bucket.query_len, bucket.num_blocks + bucket.num_unique_blocks
    return bucket.num_tokens, bucket.num_blocks * (bucket.batch_size if bucket.phase is Phase.PREFILL else 1)


@attrs.frozen(kw_only=True)
class BucketStepTimes(HostTimes):
    """A step takes the sum of the times of its passes' buckets.

    A bucket that was not measured takes what its phase's line says, times the ratio of measured time and line at the nearest measured
    bucket: the one with the least distance of the logarithms of positions and blocks.

    Attributes:
        times_s: Time of each measured bucket, seconds.
        lines: By phase: seconds of a pass, of a token position, of a block.
    """

    times_s: Mapping[Bucket, float] = attrs.field(repr=lambda times_s: f"<{len(times_s)} buckets>")
    lines: Mapping[Phase, tuple[float, float, float]]

    @times_s.validator
    def _check(self, _: object, times_s: Mapping[Bucket, float]) -> None:
        if not times_s or not all(0 < time_s < math.inf for time_s in times_s.values()):
            raise ValueError("times_s must have a bucket, and times above 0")
        if any(bucket.phase not in self.lines for bucket in times_s):
            raise ValueError("lines must have one for the phase of every bucket in times_s")

    @property
    def layout(self) -> str:
        """Batch layout of the device: ``padded`` or ``unified``."""
        return "unified" if any(isinstance(bucket, UnifiedBucket) for bucket in self.times_s) else "padded"

    def device_s(self, shape: StepShape) -> float:
        """Return the time of the step's passes, seconds.

        Raises:
            ValueError: The step names no bucket although it has tokens, or one of a phase that was never measured.
        """
        if shape.num_tokens and not shape.buckets:
            raise ValueError("these step times are those of a device with static shapes, and the step has no buckets")
        return sum(self.bucket_s(bucket) for bucket in shape.buckets)

    def bucket_s(self, bucket: Bucket) -> float:
        """Return the time of a pass in a bucket, seconds.

        Raises:
            ValueError: None of its phase was measured.
        """
        found = self.times_s.get(bucket)
        if found is not None:
            return found
        known = [one for one in self.times_s if one.phase is bucket.phase]
        if not known:
            raise ValueError(f"no {bucket.phase.value} pass was measured, so that {bucket} has no time")
        nearest = min(known, key=lambda one: (math.dist(_place(one), _place(bucket)), _place(one)))
        line_s = self._line_s(nearest)
        return self.times_s[nearest] * (self._line_s(bucket) / line_s if line_s else 1.0)

    def _line_s(self, bucket: Bucket) -> float:
        base_s, position_s, block_s = self.lines[bucket.phase]
        positions, blocks = bucket_sizes(bucket)
        return base_s + position_s * positions + block_s * blocks


def _place(bucket: Bucket) -> tuple[float, float]:
    positions, blocks = bucket_sizes(bucket)
    return math.log(max(1, positions)), math.log(1 + blocks)
