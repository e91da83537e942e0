"""Bucket sizes that grow like rabbits: a plugin for Trencadís."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command, Component, ComponentContext

from trencadis_bucketing_fibonacci.config import FibonacciConfig

if TYPE_CHECKING:
    from trencadis.interfaces import BucketingStrategy

__all__ = ["trencadis_bucketings", "trencadis_commands"]


@hookimpl
def trencadis_bucketings() -> Iterable[Component]:
    """Yield ``fibonacci``."""
    yield Component(
        name="fibonacci",
        factory=_make,
        config=FibonacciConfig,
        summary="Sizes 1, 2, 3, 5, 8, 13 … in every dimension.",
        interface_version=1,
    )


@hookimpl
def trencadis_commands() -> Iterable[Command]:
    """Yield ``fibonacci``; its module is imported when the command is chosen."""
    yield Command(
        name="fibonacci",
        summary="Print the sizes up to a limit.",
        load=partial(importlib.import_module, "trencadis_bucketing_fibonacci.command"),
    )


def _make(config: FibonacciConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_bucketing_fibonacci.fibonacci import Fibonacci

    if context.limits is None:
        raise ValueError("a bucketing strategy is built once the KV cache was sized")
    return Fibonacci(context.limits, config)
