"""Built-in bucketing strategies: which static shapes exist, and which one a pass uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trencadis.errors import ContractError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis.interfaces.bucketing import INTERFACE_VERSION
from trencadis.records import BucketLimits
from trencadis_plugins.bucketing.config import ExponentialConfig, LinearConfig

if TYPE_CHECKING:
    from trencadis.interfaces import BucketingStrategy

__all__ = ["trencadis_bucketings"]


@hookimpl
def trencadis_bucketings() -> Iterable[Component]:
    """Yield ``exact``, ``exponential`` and ``linear``."""
    yield Component(
        name="exact",
        factory=_make_exact,
        summary="Every shape as it comes, nothing padded; for backends that prepare nothing.",
        interface_version=INTERFACE_VERSION,
    )
    yield Component(
        name="exponential",
        factory=_make_exponential,
        config=ExponentialConfig,
        summary="Sizes that grow by a constant factor: few buckets over a wide range.",
        interface_version=INTERFACE_VERSION,
    )
    yield Component(
        name="linear",
        factory=_make_linear,
        config=LinearConfig,
        summary="Powers of two up to a step, then its multiples: little padding, many buckets.",
        interface_version=INTERFACE_VERSION,
    )


def _make_exact(config: NoConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.exact import Exact

    return Exact()


def _make_exponential(config: ExponentialConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.exponential import Exponential

    return Exponential(_limits(context, "exponential"), config)


def _make_linear(config: LinearConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.linear import Linear

    return Linear(_limits(context, "linear"), config)


def _limits(context: ComponentContext, name: str) -> BucketLimits:
    if context.limits is None:
        raise ContractError(
            f"[bucketing] {name} was built without shape limits: context.limits is None.",
            hint="Build it after the KV cache was sized, with ComponentContext(limits=...).",
        )
    return context.limits
