"""Adapter for KV connectors that were written for version 1 of the interface, whose scheduler side had every method in one class.

A capability of version 2 is there if the side defines a method of it; of those that it does not define, the defaults hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from trencadis.interfaces import (
    ConnectorPair,
    KVSchedulerSide,
    SupportsHandover,
    SupportsLayerwise,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsStepTimes,
)

__all__ = ["from_version_1"]


def from_version_1(pair: ConnectorPair) -> ConnectorPair:
    """Return a connector of version 2 that calls one of version 1."""
    side = pair.scheduler
    bases = [adapter for adapter, names in _ADAPTERS.items() if any(_defines(side, name) for name in names)]
    adapted: KVSchedulerSide = type("Version1Side", (*bases, _Side), {})(side)
    return attrs.evolve(pair, scheduler=adapted)


def _defines(side: object, name: str) -> bool:
    return hasattr(type(side), name) or name in vars(side)


def _calls(name: str, otherwise: Any = None) -> Any:
    """Return a method that calls the one of this name of the side, if there is one."""

    def call(self: _Side, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self.side, name, None)
        return otherwise if method is None else method(*args, **kwargs)

    call.__name__ = name
    return call


class _Side(KVSchedulerSide):
    """What every scheduler side of version 1 has.

    Args:
        side: Of version 1.
    """

    def __init__(self, side: Any) -> None:
        self.side = side

    on_ready = _calls("on_ready")
    lookup = _calls("lookup")
    on_allocated = _calls("on_allocated")
    on_unused = _calls("on_unused")
    on_computed = _calls("on_computed")
    on_finished = _calls("on_finished")
    on_cancelled = _calls("on_cancelled")
    on_failed = _calls("on_failed", "compute")
    take_message = _calls("take_message", b"")
    on_report = _calls("on_report")
    close = _calls("close")


class _Handover(_Side, SupportsHandover):
    finished_params = _calls("finished_params")
    on_rejected = _calls("on_rejected")
    on_abandoned = _calls("on_abandoned")
    on_role = _calls("on_role")


class _RemotePrefill(_Side, SupportsRemotePrefill):
    """Version 1 was asked before each step whether it has requests; it need not wake an engine that runs."""

    _wake: Callable[[], None] | None = None

    def on_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if _defines(self.side, "on_waker"):
            self.side.on_waker(wake)
        self._look()

    def take_message(self) -> bytes:
        self._look()
        message: bytes = self.side.take_message()
        return message

    def _look(self) -> None:
        if self._wake is not None and getattr(self.side, "has_requests", False):
            self._wake()

    take_requests = _calls("take_requests", ())
    take_withdrawn = _calls("take_withdrawn", ())
    on_request_token = _calls("on_request_token")
    on_request_ended = _calls("on_request_ended")
    on_backlog = _calls("on_backlog")
    on_sampling = _calls("on_sampling")


class _Layerwise(_Side, SupportsLayerwise):
    on_layerwise = _calls("on_layerwise")


class _StepTimes(_Side, SupportsStepTimes):
    on_step = _calls("on_step")


class _Metrics(_Side, SupportsMetrics):
    metrics = _calls("metrics", "")


_ADAPTERS: dict[type[_Side], tuple[str, ...]] = {
    _Handover: ("finished_params", "on_rejected", "on_abandoned", "on_role"),
    _RemotePrefill: ("take_requests", "take_withdrawn", "on_request_ended", "on_backlog", "on_sampling", "on_waker"),
    _Layerwise: ("on_layerwise",),
    _StepTimes: ("on_step",),
    _Metrics: ("metrics",),
}
"""By capability, the methods of version 1 any of which shows that a side has it."""
