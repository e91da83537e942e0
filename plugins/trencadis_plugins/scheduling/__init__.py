"""Built-in scheduling policies: who runs in a step, and for how many tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext
from trencadis.interfaces.scheduling import INTERFACE_VERSION
from trencadis_plugins.scheduling.config import FcfsConfig

if TYPE_CHECKING:
    from trencadis.interfaces import SchedulingPolicy

__all__ = ["trencadis_scheduling_policies"]


@hookimpl
def trencadis_scheduling_policies() -> Iterable[Component]:
    """Yield ``fcfs``."""
    yield Component(
        name="fcfs",
        factory=_make_fcfs,
        config=FcfsConfig,
        summary="First come, first served: decodes first, prompts in chunks, the youngest preempted.",
        interface_version=INTERFACE_VERSION,
    )


def _make_fcfs(config: FcfsConfig, context: ComponentContext) -> SchedulingPolicy:
    from trencadis_plugins.scheduling.fcfs import Fcfs

    return Fcfs(config)
