"""Cost of a bucket table: size, warm-up time, graph memory, and the padding of a workload."""

from __future__ import annotations

import attrs

from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Phase
from trencadis_gallery.bucketing.workloads.cost import DeviceCost
from trencadis_gallery.bucketing.workloads.workload import Workload

__all__ = ["TableReport", "measure"]


@attrs.frozen(kw_only=True)
class TableReport:
    """Bucket table of one strategy and its costs.

    Padding is (padded - real) / real: 0.2 means 20 % more work. Fields that depend on the workload are None
    without one.

    Attributes:
        table: Buckets of the strategy.
        warmup_s: Estimated time to prepare all buckets, seconds.
        graph_bytes: Estimated memory of all graphs, bytes.
        prompt_padding: Padding of token positions in prefill passes.
        decode_padding: Padding of KV blocks in decode passes.
        time_padding: Padding of the estimated time of all passes.
        num_unprepared: Number of passes without a prepared bucket.
        num_fallbacks: Number of distinct buckets made for unprepared passes.
    """

    table: tuple[Bucket, ...]
    warmup_s: float
    graph_bytes: float
    covering: tuple[Bucket, ...] = ()
    prompt_padding: float | None = None
    decode_padding: float | None = None
    time_padding: float | None = None
    num_unprepared: int | None = None
    num_fallbacks: int | None = None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets that an engine prepares."""
        return self.table + self.covering

    def of_phase(self, phase: Phase) -> list[Bucket]:
        """Return the buckets of one phase, in the order in which an engine lists them. Pure."""
        return [bucket for bucket in self.buckets if bucket.phase is phase]


def measure(
    strategy: BucketingStrategy,
    limits: BucketLimits,
    cost: DeviceCost,
    workload: Workload | None = None,
    *,
    covering: tuple[Bucket, ...] = (),
) -> TableReport:
    """Return the cost of a strategy's table and the padding of a workload. Calls ``bucket_for`` once for each shape.

    Args:
        strategy: Strategy built for ``limits``.
        limits: Limits of the engine.
        cost: Constants of the estimates.
        workload: Shapes that run, with their counts; None: padding is not measured.
        covering: Buckets that an engine prepares in addition to the table.
    """
    table = strategy.buckets(limits)
    report = TableReport(
        table=table,
        covering=covering,
        warmup_s=cost.compile_s * len(table + covering),
        graph_bytes=sum(cost.graph_bytes(bucket) for bucket in table + covering),
    )
    if workload is None:
        return report
    real = _Sums()
    padded = _Sums()
    fallbacks: dict[Bucket, int] = {}
    prepared = set(table)
    for item in workload.passes:
        shape, bucket = item.shape, strategy.bucket_for(item.shape)
        if bucket not in prepared:
            bucket = next((one for one in covering if one.covers(shape)), bucket)
        own_s, bucket_s = cost.step_s + cost.pass_s(shape), cost.step_s + cost.pass_s(bucket)
        real.add(shape.phase, item.num_tokens, shape.num_blocks * item.count, own_s * item.count)
        padded.add(shape.phase, bucket.num_tokens * item.count, bucket.num_blocks * item.count, bucket_s * item.count)
        if bucket not in prepared and bucket not in covering:
            fallbacks[bucket] = fallbacks.get(bucket, 0) + item.count
    return attrs.evolve(
        report,
        prompt_padding=_beyond(padded.tokens, real.tokens),
        decode_padding=_beyond(padded.blocks, real.blocks),
        time_padding=_beyond(padded.seconds, real.seconds),
        num_unprepared=sum(fallbacks.values()),
        num_fallbacks=len(fallbacks),
    )


class _Sums:
    """Sums of prompt tokens, decode blocks and seconds over all passes."""

    def __init__(self) -> None:
        self.tokens, self.blocks, self.seconds = 0, 0, 0.0

    def add(self, phase: Phase, tokens: int, blocks: int, seconds: float) -> None:
        if phase is Phase.PREFILL:
            self.tokens += tokens
        else:
            self.blocks += blocks
        self.seconds += seconds


def _beyond(padded: float, real: float) -> float:
    return padded / real - 1 if real else 0.0
