"""Books about a KV connector's transfer ids, kept between it and an engine: each load ends once, each transfer id is released once.

What the worker side reports is noted where it says it: the engine passes on to the scheduler side only what it awaits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trencadis.interfaces import (
    ConnectorPair,
    KVPool,
    KVSchedulerSide,
    KVWorkerSide,
    Lookup,
    SupportsHandover,
    SupportsLayerwise,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsRemoteWorkers,
    SupportsStepTimes,
)
from trencadis.records import ConnectorReport, FailedLoad, KVLayout, Request

__all__ = ["TransferBooks", "watched"]

_CAPABILITIES: tuple[type[Any], ...] = (
    SupportsHandover,
    SupportsRemotePrefill,
    SupportsLayerwise,
    SupportsStepTimes,
    SupportsMetrics,
    SupportsRemoteWorkers,
)


class TransferBooks:
    """What became of every transfer id.

    Attributes:
        causes: How often loads failed, by the report's words.
        num_loads: Loads that were begun.
        num_loaded: Loads that were reported as whole.
    """

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.num_loads = self.num_loaded = 0
        self._ends: dict[int, list[str]] = {}
        self._offered: set[int] = set()
        self._held: Counter[int] = Counter()
        self._released: Counter[int] = Counter()

    def offered(self, found: Lookup) -> None:
        """Note an answer to a look-up."""
        if found.num_tokens and not found.pending:
            self._offered.add(found.transfer_id)

    def unused(self, transfer_id: int) -> None:
        """Note that nothing is loaded for a hit."""
        self._offered.discard(transfer_id)

    def begun(self, transfer_id: int) -> None:
        """Note a load."""
        self._offered.discard(transfer_id)
        self.num_loads += 1
        self._ends[transfer_id] = []

    def cancelled(self, transfer_id: int) -> None:
        """Note that the engine gave a load up: from now on a release is owed."""
        self._held[transfer_id] += 1

    def held(self, transfer_id: int | None) -> None:
        """Note that the connector keeps blocks of a finished sequence."""
        if transfer_id is not None:
            self._held[transfer_id] += 1

    def reported(self, report: ConnectorReport) -> None:
        """Note a report."""
        self.num_loaded += len(report.loaded)
        self.causes.update(failed.cause for failed in report.failed)
        for transfer_id, word in [(t, "loaded") for t in report.loaded] + [
            (f.transfer_id, "failed") for f in report.failed
        ]:
            self._ends.setdefault(transfer_id, ["never begun"]).append(word)
        self._released.update(report.released)

    def faults(self) -> list[str]:
        """Return what is wrong with the books of an engine that came to rest, in words; an empty list if nothing is."""
        faults = [
            f"load {transfer_id} was reported as {', '.join(ends)}"
            for transfer_id, ends in self._ends.items()
            if len(ends) > 1
        ]
        faults += [
            f"load {transfer_id} has no end: neither reported nor given up"
            for transfer_id, ends in self._ends.items()
            if not ends and transfer_id not in self._held
        ]
        faults += [
            f"hit {transfer_id} was neither loaded nor said to be of no use" for transfer_id in sorted(self._offered)
        ]
        faults += [
            f"transfer id {transfer_id} was released {self._released[transfer_id]} times, {self._held[transfer_id]} releases are owed"
            for transfer_id in self._released | self._held
            if self._released[transfer_id] != self._held[transfer_id]
        ]
        return faults


def watched(pair: ConnectorPair) -> tuple[ConnectorPair, TransferBooks]:
    """Return a connector that does the same, and the books about it."""
    books, side = TransferBooks(), pair.scheduler
    capabilities = [capability for capability in _CAPABILITIES if isinstance(side, capability)]
    names = [name for capability in capabilities for name in vars(capability) if not name.startswith("_")]
    kind = type("_WatchedScheduler", (_Watched, *capabilities), {name: _passed_on(name) for name in names})
    return ConnectorPair(scheduler=kind(side, books), worker=_WatchedWorker(pair.worker, books)), books


def _passed_on(name: str) -> Callable[..., Any]:
    """Return a method that calls the one of this name of the side that is watched."""
    return lambda self, *args, **kwargs: getattr(self._side, name)(*args, **kwargs)


class _Watched(KVSchedulerSide):
    def __init__(self, side: KVSchedulerSide, books: TransferBooks) -> None:
        self._side = side
        self._books = books

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        found = self._side.lookup(request, block_hashes=block_hashes, num_local_tokens=num_local_tokens)
        self._books.offered(found)
        return found

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        self._books.begun(transfer_id)
        self._side.on_allocated(transfer_id, blocks=blocks, block_hashes=block_hashes)

    def on_unused(self, transfer_id: int) -> None:
        self._books.unused(transfer_id)
        self._side.on_unused(transfer_id)

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        self._side.on_computed(blocks=blocks, block_hashes=block_hashes)

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        transfer_id = self._side.on_finished(request, blocks=blocks)
        self._books.held(transfer_id)
        return transfer_id

    def on_cancelled(self, transfer_id: int) -> None:
        self._books.cancelled(transfer_id)
        self._side.on_cancelled(transfer_id)

    def take_message(self) -> bytes:
        return self._side.take_message()

    def on_report(self, report: ConnectorReport) -> None:
        self._side.on_report(report)

    def on_failed(self, request: Request, failed: FailedLoad) -> str:
        return self._side.on_failed(request, failed)

    def on_ready(self, layout: KVLayout) -> None:
        self._side.on_ready(layout)

    def close(self) -> None:
        self._side.close()


class _WatchedWorker(KVWorkerSide):
    def __init__(self, side: KVWorkerSide, books: TransferBooks) -> None:
        self._side = side
        self._books = books

    def register(self, kv_cache: KVPool) -> None:
        self._side.register(kv_cache)

    def expect_layers(self) -> None:
        self._side.expect_layers()

    def begin_step(self, message: bytes) -> None:
        self._side.begin_step(message)

    @property
    def wants_layers(self) -> bool:
        return self._side.wants_layers

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        return self._side.wait_layer(layer, budget_s=budget_s)

    def end_step(self) -> None:
        self._side.end_step()

    def poll(self) -> ConnectorReport:
        report = self._side.poll()
        self._books.reported(report)
        return report

    def close(self) -> None:
        self._side.close()
