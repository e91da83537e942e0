"""Prepare every bucket before the first request, so that none is compiled while one waits.

A backend may put some off, and prepare them while there is nothing to serve; until then their shapes run in larger ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import attrs

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.clock import Clock
from trencadis.config.schema import BucketingConfig, Config
from trencadis.engine.batching.passes import PassPlanner
from trencadis.engine.guard import Guarded
from trencadis.errors import ConfigValueError, ContractError
from trencadis.faults import shown
from trencadis.interfaces import BucketingStrategy, Executor, SupportsDeferredWarmUp, covering_buckets
from trencadis.records import Bucket, BucketLimits, Shape, WarmUpReport

__all__ = ["BackgroundWarmUp", "WarmUp", "check_misses", "completing_buckets", "listed_buckets", "warm_up"]

logger = logging.getLogger("trencadis.engine")

_POLL_S = 0.05
_MAX_BUCKETS = 100_000
"""More would take days to prepare."""


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

    @property
    def deferred(self) -> tuple[Bucket, ...]:
        """Buckets of the table that are prepared later."""
        return self.skipped if self.report.num_deferred else ()


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


class BackgroundWarmUp:
    """Prepares what the warm-up put off. Engine thread.

    Args:
        executor: Prepares.
        passes: Is told what is ready.
        warmed: What came before.
    """

    def __init__(self, executor: SupportsDeferredWarmUp, passes: PassPlanner, warmed: WarmUp) -> None:
        self._executor = executor
        self._passes = passes
        self._num_deferred = self._num_left = warmed.report.num_deferred
        self._num_all = len(warmed.buckets)

    def start_again(self) -> None:
        """Begin anew: the ranks were started again, and have put off the same."""
        self._num_left = self._num_deferred

    def behind_step(self) -> None:
        """Let the backend use the time that it allows itself after a step; waits for nothing."""
        if self._num_left:
            self._advance(is_idle=False)

    def while_idle(self) -> float | None:
        """Prepare something; returns seconds until it pays to call again, or None if nothing is left."""
        ACTIVITY.begin(EnginePhase.COMPILING)
        found = self._advance(is_idle=True) if self._num_left else 0
        if not self._num_left:
            return None
        return 0.0 if found else _POLL_S

    def _advance(self, *, is_idle: bool) -> int:
        """Return how many buckets are ready now that were not before.

        A failure ends it, and nothing else: larger buckets go on serving in the place of those that are left.
        """
        try:
            ready = self._executor.warm_up_rest(is_idle=is_idle)
        except Exception:
            logger.exception("%d buckets cannot be prepared; larger ones serve in their place.", self._num_left)
            self._num_left = 0
            return 0
        if ready:
            self._num_left -= len(ready)
            self._passes.prepared(ready)
            logger.info("Prepared %d of %d buckets.", self._num_all - self._num_left, self._num_all)
        return len(ready)


def completing_buckets(
    config: BucketingConfig, bucket_for: Callable[[Shape], Bucket], table: Collection[Bucket], limits: BucketLimits
) -> tuple[Bucket, ...]:
    """Return the buckets that are prepared beside a strategy's table: those that cover legal shapes it leaves out.

    Args:
        config: Whether there are any; there are none where misses are refused.
        bucket_for: The strategy's.
        table: The strategy's table. Without one nothing is prepared, and a unified one has its largest passes.
        limits: What bounds every shape.
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
