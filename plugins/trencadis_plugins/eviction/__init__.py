"""Built-in eviction policies: which unreferenced cached blocks go first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis.interfaces.eviction import INTERFACE_VERSION

if TYPE_CHECKING:
    from trencadis.interfaces import EvictionPolicy

__all__ = ["trencadis_eviction_policies"]


@hookimpl
def trencadis_eviction_policies() -> Iterable[Component]:
    """Yield ``lru``."""
    yield Component(
        name="lru",
        factory=_make_lru,
        summary="The block unused for longest goes first; of one sequence, the last block.",
        interface_version=INTERFACE_VERSION,
    )


def _make_lru(config: NoConfig, context: ComponentContext) -> EvictionPolicy:
    from trencadis_plugins.eviction.lru import Lru

    return Lru()
