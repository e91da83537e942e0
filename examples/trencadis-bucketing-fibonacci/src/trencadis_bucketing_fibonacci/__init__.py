"""Bucket sizes that grow like rabbits: a plugin for Trencadís."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext
from trencadis.interfaces.bucketing import INTERFACE_VERSION

from trencadis_bucketing_fibonacci.config import FibonacciConfig

if TYPE_CHECKING:
    from trencadis.interfaces import BucketingStrategy

__all__ = ["trencadis_bucketings"]


@hookimpl
def trencadis_bucketings() -> Iterable[Component]:
    """Yield ``fibonacci``."""
    yield Component(
        name="fibonacci",
        factory=_make,
        config=FibonacciConfig,
        summary="Sizes 1, 2, 3, 5, 8, 13 … in every dimension.",
        interface_version=INTERFACE_VERSION,
    )


def _make(config: FibonacciConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_bucketing_fibonacci.fibonacci import Fibonacci

    if context.limits is None:
        raise ValueError("a bucketing strategy is built once the KV cache was sized")
    return Fibonacci(context.limits, config)
