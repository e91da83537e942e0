"""Built-in bucketing strategies: which static shapes exist, and which one a pass uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trencadis.errors import ContractError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis.interfaces.bucketing import INTERFACE_VERSION
from trencadis.records import BucketLimits
from trencadis_plugins.bucketing.config import (
    ExponentialConfig,
    FromFileConfig,
    LinearConfig,
    PaddingAwareConfig,
    UnifiedConfig,
)

if TYPE_CHECKING:
    from trencadis.interfaces import BucketingStrategy

__all__ = ["limits_of", "trencadis_bucketings"]

_UNIFIED = frozenset({"bucketing.unified"})


@hookimpl
def trencadis_bucketings() -> Iterable[Component]:
    """Yield the built-in strategies."""
    yield Component(
        name="exact",
        factory=_make_exact,
        summary="Every shape as it comes, nothing padded; for backends that prepare nothing.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
        provides=_UNIFIED,
    )
    yield Component(
        name="exponential",
        factory=_make_exponential,
        config=ExponentialConfig,
        summary="Sizes that grow by a constant factor: few buckets over a wide range.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )
    yield Component(
        name="linear",
        factory=_make_linear,
        config=LinearConfig,
        summary="Powers of two up to a step, then its multiples: little padding, many buckets.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )
    yield Component(
        name="padding_aware",
        factory=_make_padding_aware,
        config=PaddingAwareConfig,
        summary="Multiples of a step as far as padding bounds ask for them: between exponential and linear.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )
    yield Component(
        name="unified",
        factory=_make_unified,
        config=UnifiedConfig,
        summary="The sizes of unified attention in each dimension: few, and tied to the number of sequences.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
        provides=_UNIFIED,
    )
    yield Component(
        name="from_file",
        factory=_make_from_file,
        config=FromFileConfig,
        summary="The buckets that a file lists.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )


def _make_exact(config: NoConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.exact import Exact

    return Exact()


def _make_exponential(config: ExponentialConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.exponential import Exponential

    return Exponential(limits_of(context, "exponential"), config)


def _make_linear(config: LinearConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.linear import Linear

    return Linear(limits_of(context, "linear"), config)


def _make_padding_aware(config: PaddingAwareConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.padding_aware import PaddingAware

    return PaddingAware(limits_of(context, "padding_aware"), config)


def _make_unified(config: UnifiedConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.unified import Unified

    return Unified(limits_of(context, "unified"), config)


def _make_from_file(config: FromFileConfig, context: ComponentContext) -> BucketingStrategy:
    from trencadis_plugins.bucketing.from_file import FromFile

    return FromFile(limits_of(context, "from_file"), config)


def limits_of(context: ComponentContext, name: str) -> BucketLimits:
    """Return the shape limits that a strategy is built for.

    Raises:
        ContractError: The context has none.
    """
    if context.limits is None:
        raise ContractError(
            f"[bucketing] {name} was built without shape limits: context.limits is None.",
            hint="Build it after the KV cache was sized, with ComponentContext(limits=...).",
        )
    return context.limits
