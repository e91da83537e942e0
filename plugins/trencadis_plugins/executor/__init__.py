"""Built-in executors: the hook."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, Executor, NoConfig
from trencadis.interfaces.executor import INTERFACE_VERSION
from trencadis_plugins.executor.config import ProcessesConfig, RayConfig

__all__ = ["trencadis_executors"]


@hookimpl
def trencadis_executors() -> Iterable[Component]:
    """Yield ``inline``, ``processes`` and ``ray``."""
    yield Component(
        name="inline",
        factory=_make_inline,
        summary="One backend in this process, on a thread of its own.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )
    yield Component(
        name="processes",
        factory=_make_processes,
        config=ProcessesConfig,
        summary="Each rank in a process of its own, on this machine.",
        interface_version=INTERFACE_VERSION,
        provides=frozenset({"executor.ranks"}),
    )
    yield Component(
        name="ray",
        factory=_make_ray,
        config=RayConfig,
        summary="Each rank in an actor of a Ray cluster, on one machine or several.",
        interface_version=INTERFACE_VERSION,
        provides=frozenset({"executor.ranks"}),
    )


def _make_inline(config: NoConfig, context: ComponentContext) -> Executor:
    from trencadis_plugins.executor.inline import InlineExecutor

    return InlineExecutor()


def _make_processes(config: ProcessesConfig, context: ComponentContext) -> Executor:
    from trencadis_plugins.executor.processes import ProcessesExecutor

    return ProcessesExecutor(config, layout=context.layout, replica=context.replica)


def _make_ray(config: RayConfig, context: ComponentContext) -> Executor:
    from trencadis_plugins.executor.ray_cluster import RayExecutor

    return RayExecutor(config, layout=context.layout, replica=context.replica, num_replicas=context.num_replicas)
