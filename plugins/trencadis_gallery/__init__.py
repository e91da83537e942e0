"""Strategies that reproduce papers and serve experiments: a folder for each noun, a file for each strategy.

They come in through the door that every plugin uses, and stand on the bases of ``trencadis_plugins``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis_gallery.config import (
    FittedConfig,
    MultiLevelConfig,
    S3FifoConfig,
    SlruConfig,
    SyntheticConfig,
    TwoQueueConfig,
)

if TYPE_CHECKING:
    from trencadis_gallery.bucketing.fitted import Fitted

__all__ = [
    "trencadis_acceptance_rules",
    "trencadis_bucketings",
    "trencadis_eviction_policies",
    "trencadis_scheduling_policies",
]


@hookimpl
def trencadis_eviction_policies() -> Iterable[Component]:
    """Yield ``slru``, ``two_queue``, ``s3_fifo`` and ``arc``."""
    for name, class_name, config, summary in (
        ("slru", "Slru", SlruConfig, "Blocks that were used only once go first, the oldest of them."),
        ("two_queue", "TwoQueue", TwoQueueConfig, "New blocks go by arrival; what comes back after that stays longer."),
        ("s3_fifo", "S3Fifo", S3FifoConfig, "A small queue for what is used once, and second chances for the rest."),
        ("arc", "Arc", NoConfig, "Blocks used once and more often share the cache as hits on evicted blocks suggest."),
    ):
        yield Component(
            name=name,
            factory=_factory(f"eviction.{name}", class_name),
            config=config,
            summary=summary,
            interface_version=1,
            stability="stable",
        )


@hookimpl
def trencadis_scheduling_policies() -> Iterable[Component]:
    """Yield ``multi_level``."""
    yield Component(
        name="multi_level",
        factory=_factory("scheduling.multi_level", "MultiLevel"),
        config=MultiLevelConfig,
        summary="Levels by work done so far, the least first; the others give way.",
        interface_version=1,
    )


@hookimpl
def trencadis_bucketings() -> Iterable[Component]:
    """Yield ``fitted``."""
    yield Component(
        name="fitted",
        factory=_make_fitted,
        config=FittedConfig,
        summary="The buckets that pad a trace least, as many as a budget pays for.",
        interface_version=1,
    )


@hookimpl
def trencadis_acceptance_rules() -> Iterable[Component]:
    """Yield ``synthetic``."""
    yield Component(
        name="synthetic",
        factory=_factory("acceptance.synthetic", "Synthetic"),
        config=SyntheticConfig,
        summary="For measurements only: drafts stand by given rates; the text is wrong.",
        interface_version=1,
    )


def _factory(module: str, class_name: str) -> Callable[[Any, ComponentContext], Any]:
    """Return a factory that imports its strategy when it is called."""

    def make(config: Any, context: ComponentContext) -> Any:
        made = getattr(importlib.import_module(f"{__name__}.{module}"), class_name)
        return made() if isinstance(config, NoConfig) else made(config)

    return make


def _make_fitted(config: FittedConfig, context: ComponentContext) -> Fitted:
    from trencadis_gallery.bucketing.fitted import Fitted
    from trencadis_plugins.bucketing import limits_of

    return Fitted(limits_of(context, "fitted"), config)
