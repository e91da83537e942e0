"""The backend ``gaudi`` for Intel Gaudi and its emulation on a CPU. Hooks only; the factory imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Backend, Command, CommandGroup, Component, ComponentContext, HealthCheck
from trencadis_gaudi.config import GaudiConfig

__all__ = ["trencadis_backends", "trencadis_commands", "trencadis_health_checks"]


@hookimpl
def trencadis_backends() -> Iterable[Component]:
    """Yield ``gaudi``."""
    yield Component(
        name="gaudi",
        factory=_make_gaudi,
        config=GaudiConfig,
        summary="Intel Gaudi through habana_frameworks: buckets, HPU graphs or torch.compile; or emulated on a CPU.",
        interface_version=1,
        provides=frozenset({"backend.expert"}),
        prepare=_prepare,
    )


@hookimpl
def trencadis_commands() -> Iterable[Command]:
    """Yield ``gaudi-check``."""
    yield Command(
        name="gaudi-check",
        summary="Test on a Gaudi each fact that the backend gaudi relies on, and say what it means if one does not hold.",
        group=CommandGroup.OPERATING,
        load=partial(importlib.import_module, "trencadis_gaudi.checks.command"),
    )


@hookimpl
def trencadis_health_checks() -> Iterable[HealthCheck]:
    """Yield ``gaudi``."""
    from trencadis_gaudi.health_check import check_gaudi

    yield HealthCheck(name="gaudi", run=check_gaudi)


def _prepare(config: GaudiConfig) -> None:
    from trencadis_gaudi.environment import prepare

    prepare(config)


def _make_gaudi(config: GaudiConfig, context: ComponentContext) -> Backend:
    from trencadis_gaudi.backend import GaudiBackend

    return GaudiBackend(config, clock=context.clock)
