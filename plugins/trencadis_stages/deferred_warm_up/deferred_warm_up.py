"""Buckets that the warm-up put off are prepared behind steps and while there is nothing to serve; until then larger ones stand in for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.engine.step import SubmittedStep
from trencadis.errors import ContractError, RanksLostError
from trencadis.interfaces import SupportsDeferredWarmUp
from trencadis.records import Bucket, Plan, Shape, StepOutput, UnifiedBucket

__all__ = ["DeferredWarmUp", "make_deferred_warm_up"]

logger = logging.getLogger("trencadis.engine")

_POLL_S = 0.05


class DeferredWarmUp(Stage):
    """Prepares what the warm-up put off.

    Args:
        label: Names executor and backend in messages.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._num_left = 0
        self._left: set[Bucket] = set()
        self._found: dict[Shape, Bucket] = {}

    def bind(self, engine: EngineParts) -> None:
        """Take the parts; rest if nothing was put off.

        Raises:
            ContractError: Something was, and nothing can prepare it.
        """
        self._warm_up, self._buckets, self._take_part = engine.warm_up, engine.buckets, engine.take_part
        num_deferred = self._warm_up.report.num_deferred
        if not num_deferred:
            self._take_part(self, False)
            return
        if not isinstance(engine.executor, SupportsDeferredWarmUp):
            raise ContractError(
                f"{self._label} put off {num_deferred} buckets in warm_up(), and has no warm_up_rest().",
                hint="Mend it, or choose another in executor.name or backend.name.",
            )
        self._executor = engine.executor
        self._begin()

    def _begin(self) -> None:
        self._num_left, self._left = self._warm_up.report.num_deferred, set(self._warm_up.skipped)
        self._found.clear()
        self._buckets.substitute = self._substitute
        self._take_part(self, True)

    def received(self, step: SubmittedStep, output: StepOutput) -> None:
        """Let the backend use the time that it allows itself after a step; waits for nothing."""
        if self._num_left:
            self._advance(is_idle=False)

    def idle(self) -> float | None:
        """Prepare one more bucket."""
        if not self._num_left:
            return None
        ACTIVITY.begin(EnginePhase.COMPILING)
        found = self._advance(is_idle=True)
        if not self._num_left:
            return None
        return 0.0 if found else _POLL_S

    def failed(self, plans: Iterable[Plan], error: Exception) -> None:
        """Begin anew where ranks are started again: they put off the same."""
        if isinstance(error, RanksLostError) and self._warm_up.report.num_deferred:
            self._begin()

    def _advance(self, *, is_idle: bool) -> int:
        """Return how many buckets are ready now that were not before.

        A failure ends it, and nothing else: larger buckets go on serving in the place of those that are left.
        """
        try:
            ready = self._executor.warm_up_rest(is_idle=is_idle)
        except Exception:
            logger.exception("%d buckets cannot be prepared; larger ones serve in their place.", self._num_left)
            self._end()
            return 0
        if ready:
            self._num_left -= len(ready)
            self._left.difference_update(ready)
            self._found.clear()
            self._buckets.prepared(ready)
            num_all = len(self._warm_up.buckets)
            logger.info("Prepared %d of %d buckets.", num_all - self._num_left, num_all)
            if not self._left:
                self._buckets.substitute = None
            if not self._num_left:
                self._end()
        return len(ready)

    def _end(self) -> None:
        self._num_left = 0
        self._take_part(self, False)

    def _substitute(self, shape: Shape, bucket: Bucket) -> Bucket:
        """Return the smallest prepared bucket that covers a shape if its own is put off; its own if there is none."""
        if bucket not in self._left:
            return bucket
        found = self._found.get(shape)
        if found is None:
            covering = [one for one in self._buckets.ready if one.covers(shape)]
            found = self._found[shape] = min(covering, key=_cost, default=bucket)
        return found


def _cost(bucket: Bucket) -> tuple[int, int, int, int]:
    """Return what a pass in a bucket computes, and then reads."""
    unique = bucket.num_unique_blocks if isinstance(bucket, UnifiedBucket) else 0
    return bucket.num_tokens, bucket.num_blocks + unique, bucket.batch_size, bucket.query_len


def make_deferred_warm_up(makings: Makings) -> Stage | None:
    """Return the stage; None where no pass has a bucket."""
    return None if makings.executor.capabilities.layout == "ragged" else DeferredWarmUp(makings.device_label)
