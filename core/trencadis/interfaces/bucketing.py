"""Contract of the noun ``bucketing``: which static shapes exist, and which one a pass uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from trencadis.errors import ContractError
from trencadis.faults import shown
from trencadis.interfaces.laws import Law, law, tell
from trencadis.records import Bucket, BucketLimits, Shape

__all__ = ["INTERFACE_VERSION", "STABILITY", "BucketingStrategy"]

INTERFACE_VERSION = 1
STABILITY = "stable"


def _covering(method: str, answer: Any, shape: Shape) -> Bucket:
    if isinstance(answer, Bucket) and answer.covers(shape):
        return answer
    raise ContractError(f"{method}({shown(shape)}) returned {shown(answer)}, which does not cover it")


class BucketingStrategy(ABC):
    """Decides the table of static shapes and the bucket of each pass.

    It sees sizes only, never sequences, so the same object serves run time, warm-up, simulation and tests.
    Built with ``context.limits`` set. Called on the engine thread.

    A call of ``bucket_for`` or ``observe`` may take ``[budget] bucketing_ms``. A strategy that takes longer three times within a minute,
    or once ten times as long, is replaced by its fallback.
    """

    @abstractmethod
    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the finite table of both phases, sorted by phase and fields, without duplicates.

        Pure; called at start-up, by warm-up and by tools. Empty if shapes are used as they come.

        Args:
            limits: Limits of every legal shape.
        """

    @abstractmethod
    @law(Law("a bucket that covers ``shape``", _covering, ("shape",)), opens=True)
    def bucket_for(self, shape: Shape) -> Bucket:
        """Return a bucket that covers ``shape`` in every dimension.

        A strategy that has no prepared bucket for a legal shape returns a fallback that covers it; the core checks
        that, remembers, counts, and warns about it once. Same shape, same bucket. Called once per pass and step;
        O(log n) in the number of buckets, at most 5 µs.

        Args:
            shape: Sizes before padding, each within the limits.
        """

    @tell  # noqa: B027 - optional
    def observe(self, shape: Shape, bucket: Bucket) -> None:
        """Receives which bucket a pass ran in; for strategies that learn. Once per pass and step, at most 2 µs."""
