"""Prepare every bucket before the first request, so that none is compiled while one waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.clock import Clock
from trencadis.config.schema import BucketingConfig, Config
from trencadis.engine.guard import Guarded
from trencadis.errors import ConfigValueError, ContractError
from trencadis.faults import shown
from trencadis.interfaces import BucketingStrategy, Executor, covering_buckets
from trencadis.records import Bucket, BucketLimits, Shape, WarmUp

__all__ = ["check_misses", "wanted_covering_buckets", "listed_buckets", "warm_up"]

logger = logging.getLogger("trencadis.engine")

_MAX_BUCKETS = 100_000
"""More would take days to prepare."""


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
        buckets: Those that the bucketing strategy lists; may be empty.
        clock: For the duration.
        progress: Called with the number done and the number of all, after each.
    """
    if not buckets:
        return WarmUp()
    start_s = clock.now_s()
    ACTIVITY.begin(EnginePhase.COMPILING)
    ACTIVITY.begin_part("warm-up")
    report = executor.warm_up(buckets, progress=progress)
    ACTIVITY.begin(EnginePhase.LOADING)
    done = WarmUp(buckets=buckets, report=report, took_s=clock.now_s() - start_s)
    logger.info("Prepared %d buckets in %.1f s.", len(report.prepared), done.took_s)
    if report.num_deferred:
        logger.info("%d of %d buckets are prepared later.", report.num_deferred, len(buckets))
    elif done.skipped:
        logger.warning("%d of %d buckets are not prepared: %s", len(done.skipped), len(buckets), list(done.skipped[:8]))
    return done


def wanted_covering_buckets(
    config: BucketingConfig, bucket_for: Callable[[Shape], Bucket], table: Collection[Bucket], limits: BucketLimits
) -> tuple[Bucket, ...]:
    """Return the buckets that are prepared beside a strategy's table: those that cover legal shapes it leaves out.

    Args:
        config: Whether there are any; there are none where misses are refused.
        bucket_for: The strategy's.
        table: The strategy's table. Without one nothing is prepared, and a unified one has its largest passes.
        limits: Bounds of every shape.
    """
    if not config.complete or config.on_miss == "refuse" or not table or limits.unified:
        return ()
    return covering_buckets(bucket_for, table, limits)


def check_misses(config: Config, bucketing: Guarded[BucketingStrategy], buckets: tuple[Bucket, ...]) -> None:
    """Refuse an engine that would refuse every request.

    Raises:
        ConfigValueError: Passes without a prepared bucket are refused, and none is prepared.
    """
    if config.bucketing.on_miss == "refuse" and not buckets:
        why = f"{bucketing.label} lists no bucket" if config.engine.warmup else "engine.warmup is off"
        raise ConfigValueError(
            f'[bucketing] on_miss = "refuse", but {why}: every request would be refused.',
            hint="Set it to fallback, turn engine.warmup on, or choose a bucketing strategy with a table.",
        )


def listed_buckets(bucketing: Guarded[BucketingStrategy], limits: BucketLimits) -> tuple[Bucket, ...]:
    """Return the buckets that a strategy lists.

    Raises:
        ContractError: It lists something else, or more than can be prepared.
    """
    table: object = bucketing.strategy.buckets(limits)
    if isinstance(table, tuple | list) and len(table) <= _MAX_BUCKETS and all(isinstance(one, Bucket) for one in table):
        return tuple(table)
    raise ContractError(
        f"{bucketing.label} returned {shown(table)} from buckets(), which must be a tuple of at most {_MAX_BUCKETS} Buckets.",
        hint="Mend it, or choose another in bucketing.name.",
    )
