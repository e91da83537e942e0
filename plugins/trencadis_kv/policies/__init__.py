"""Built-in KV policies: which KV blocks are worth moving."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis_kv.interfaces.kv_policy import INTERFACE_VERSION
from trencadis_kv.policies.config import CostAwareConfig

if TYPE_CHECKING:
    from trencadis_kv.interfaces import KVPolicy

__all__ = ["trencadis_kv_policies"]


@hookimpl
def trencadis_kv_policies() -> Iterable[Component]:
    """Yield ``cost_aware`` and ``always``."""
    yield Component(
        name="cost_aware",
        factory=_make_cost_aware,
        config=CostAwareConfig,
        summary="Loads what is sooner here than computed; saves while there is room to stage it.",
        interface_version=INTERFACE_VERSION,
    )
    yield Component(
        name="always",
        factory=_make_always,
        summary="Loads and saves whatever can be.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )


def _make_cost_aware(config: CostAwareConfig, context: ComponentContext) -> KVPolicy:
    from trencadis_kv.policies.cost_aware import CostAware

    return CostAware(config)


def _make_always(config: NoConfig, context: ComponentContext) -> KVPolicy:
    from trencadis_kv.policies.always import Always

    return Always()
