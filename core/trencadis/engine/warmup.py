"""Prepare every bucket before the first request, so that none is compiled while one waits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trencadis.clock import Clock
from trencadis.interfaces import Executor
from trencadis.records import Bucket

__all__ = ["warm_up"]

logger = logging.getLogger("trencadis.engine")


def warm_up(
    executor: Executor,
    buckets: tuple[Bucket, ...],
    *,
    clock: Clock,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Prepare ``buckets``, largest first, and return the seconds it took.

    Args:
        executor: Prepares them on every rank.
        buckets: What the bucketing strategy lists; may be empty.
        clock: For the duration.
        progress: Called with the number done and the number of all, after each.
    """
    start_s = clock.now_s()
    for done, bucket in enumerate(sorted(buckets, reverse=True), start=1):
        executor.prepare(bucket)
        if progress is not None:
            progress(done, len(buckets))
    took_s = clock.now_s() - start_s
    if buckets:
        logger.info("Prepared %d buckets in %.1f s.", len(buckets), took_s)
    return took_s
