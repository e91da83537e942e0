"""Prepare every bucket before the first request, so that none is compiled while one waits."""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs

from trencadis.clock import Clock
from trencadis.interfaces import Executor
from trencadis.records import Bucket, WarmUpReport

__all__ = ["WarmUp", "warm_up"]

logger = logging.getLogger("trencadis.engine")


@attrs.frozen(kw_only=True)
class WarmUp:
    """A warm-up that is over.

    Attributes:
        buckets: What was asked for.
        report: What the backend made of it.
        took_s: Duration, seconds.
    """

    buckets: tuple[Bucket, ...] = ()
    report: WarmUpReport = attrs.field(factory=lambda: WarmUpReport(prepared=()))
    took_s: float = 0.0

    @property
    def skipped(self) -> tuple[Bucket, ...]:
        """Buckets that are not prepared, in the order of the table."""
        prepared = set(self.report.prepared)
        return tuple(bucket for bucket in self.buckets if bucket not in prepared)


def warm_up(
    executor: Executor,
    buckets: tuple[Bucket, ...],
    *,
    clock: Clock,
    progress: Callable[[int, int], None] | None = None,
) -> WarmUp:
    """Have ``buckets`` prepared, and return what became of it.

    Args:
        executor: Prepares them on every rank.
        buckets: What the bucketing strategy lists; may be empty.
        clock: For the duration.
        progress: Called with the number done and the number of all, after each.
    """
    if not buckets:
        return WarmUp()
    start_s = clock.now_s()
    report = executor.warm_up(buckets, progress=progress)
    done = WarmUp(buckets=buckets, report=report, took_s=clock.now_s() - start_s)
    logger.info("Prepared %d buckets in %.1f s.", len(report.prepared), done.took_s)
    if done.skipped:
        logger.warning("%d of %d buckets are not prepared: %s", len(done.skipped), len(buckets), list(done.skipped[:8]))
    return done
