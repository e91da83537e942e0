"""Built-in observers of steps and requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext
from trencadis.interfaces.observer import INTERFACE_VERSION
from trencadis_plugins.observer.config import LogObserverConfig, PrometheusObserverConfig, RecorderObserverConfig

if TYPE_CHECKING:
    from trencadis.interfaces import Observer

__all__ = ["trencadis_observers"]


@hookimpl
def trencadis_observers() -> Iterable[Component]:
    """Yield ``log``, ``prometheus`` and ``recorder``."""
    yield Component(
        name="log",
        factory=_make_log,
        config=LogObserverConfig,
        summary="One line every few seconds: load, throughput, cache, padding.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )
    yield Component(
        name="prometheus",
        factory=_make_prometheus,
        config=PrometheusObserverConfig,
        summary="Counters, gauges and latency histograms in a registry of their own.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )
    yield Component(
        name="recorder",
        factory=_make_recorder,
        config=RecorderObserverConfig,
        summary="Sizes and times of every step as JSON lines, to fit step times from (bench fit).",
        interface_version=INTERFACE_VERSION,
    )


def _make_log(config: LogObserverConfig, context: ComponentContext) -> Observer:
    from trencadis_plugins.observer.log import LogObserver

    return LogObserver(config)


def _make_prometheus(config: PrometheusObserverConfig, context: ComponentContext) -> Observer:
    from trencadis_plugins.observer.prometheus import PrometheusObserver

    return PrometheusObserver(config=config)


def _make_recorder(config: RecorderObserverConfig, context: ComponentContext) -> Observer:
    from trencadis_plugins.observer.recorder import RecorderObserver

    return RecorderObserver(config, context)
