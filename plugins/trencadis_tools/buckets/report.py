"""What a table is worth: its size, what preparing it takes, and how much a workload is padded in it."""

from __future__ import annotations

import attrs

from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Phase
from trencadis_plugins.bucketing.workloads.cost import DeviceCost
from trencadis_plugins.bucketing.workloads.workload import Workload

__all__ = ["TableReport", "measure"]


@attrs.frozen(kw_only=True)
class TableReport:
    """One strategy's table and what it costs.

    Padding is what is computed beyond what was asked for, divided by what was asked for: 0.2 is a fifth more. Fields of a
    workload are None without one.

    Attributes:
        table: The strategy's.
        warmup_s: Estimated time to prepare all buckets.
        graph_bytes: Estimated memory of its graphs.
        prompt_padding: Token positions of prefill passes against new tokens.
        decode_padding: KV blocks of decode passes against blocks read.
        time_padding: Estimated time of all passes against their time without padding.
        num_unprepared: Passes for which nothing was prepared.
        num_fallbacks: Distinct buckets made for them.
    """

    table: tuple[Bucket, ...]
    warmup_s: float
    graph_bytes: float
    completing: tuple[Bucket, ...] = ()
    prompt_padding: float | None = None
    decode_padding: float | None = None
    time_padding: float | None = None
    num_unprepared: int | None = None
    num_fallbacks: int | None = None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All that an engine prepares."""
        return self.table + self.completing

    def of_phase(self, phase: Phase) -> list[Bucket]:
        """Return the buckets of one phase, in the order in which an engine lists them. Pure."""
        return [bucket for bucket in self.buckets if bucket.phase is phase]


def measure(
    strategy: BucketingStrategy,
    limits: BucketLimits,
    cost: DeviceCost,
    workload: Workload | None = None,
    *,
    completing: tuple[Bucket, ...] = (),
) -> TableReport:
    """Return what a strategy's table costs, and what it does to a workload. Asks ``bucket_for`` once for each shape.

    Args:
        strategy: Built for ``limits``.
        limits: Of the engine.
        cost: The constants of the estimates.
        workload: Which shapes run, and how often; none: padding is not measured.
        completing: Buckets that an engine prepares beside the table.
    """
    table = strategy.buckets(limits)
    report = TableReport(
        table=table,
        completing=completing,
        warmup_s=cost.compile_s * len(table + completing),
        graph_bytes=sum(cost.graph_bytes(bucket) for bucket in table + completing),
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
            bucket = next((one for one in completing if one.covers(shape)), bucket)
        own_s, bucket_s = cost.step_s + cost.pass_s(shape), cost.step_s + cost.pass_s(bucket)
        real.add(shape.phase, item.num_tokens, shape.num_blocks * item.count, own_s * item.count)
        padded.add(shape.phase, bucket.num_tokens * item.count, bucket.num_blocks * item.count, bucket_s * item.count)
        if bucket not in prepared and bucket not in completing:
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
    """Prompt tokens, decode blocks and seconds of all passes."""

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
