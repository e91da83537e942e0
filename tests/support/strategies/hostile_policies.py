"""Scheduling policies that misbehave, each in its own way, importable by path; and a house with the real policies on a fake backend."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from support.kv.wild_connector import WildConnector
from trencadis.client.factory import configure
from trencadis.config import Config
from trencadis.interfaces import ConnectorPair, SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Int32Array, Request
from trencadis.registry import Registry
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import ExactShapes
from trencadis_testing.fakes import FakeBackend


class Raises(SchedulingPolicy):
    """Raises when it is asked for an order."""

    def order(self, view: SchedulerView) -> Int32Array:
        raise KeyError("a bug in a plugin")


class Forgets(SchedulingPolicy):
    """Leaves somebody out, once three wait."""

    def order(self, view: SchedulerView) -> Int32Array:
        return view.waiting[:-1] if len(view.waiting) > 2 else view.waiting


class Fractions(SchedulingPolicy):
    """Gives half a token."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        return TokenSplit(decode=1.5, prefill=token_budget)  # type: ignore[arg-type]


class Starves(SchedulingPolicy):
    """Lets nobody run."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        return TokenSplit(decode=0, prefill=0)


class Spoils(SchedulingPolicy):
    """Takes what it is shown for its own."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        view.waiting = np.empty(0, np.int32)
        view.now_s = 1e9
        view.num_tokens[:] = 0
        return TokenSplit(decode=token_budget, prefill=token_budget)


class DeafEars(SchedulingPolicy):
    """Raises when it is told of a request."""

    def on_added(self, *, slot: int, request: Request) -> None:
        raise ValueError("not now")


class Backwards(SchedulingPolicy):
    """The last come first, and the oldest loses its blocks."""

    def order(self, view: SchedulerView) -> Int32Array:
        return view.waiting[::-1]

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        return int(candidates[0])


class Exits(SchedulingPolicy):
    """Wants the process to end."""

    def order(self, view: SchedulerView) -> Int32Array:
        raise SystemExit(3)


class Interrupts(SchedulingPolicy):
    """Raises what Ctrl-C raises."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        raise KeyboardInterrupt


class Vanishes(SchedulingPolicy):
    """Ends the process without a word."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        os._exit(7)


class Circles(SchedulingPolicy):
    """Never answers."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        while True:
            pass


class Floods(SchedulingPolicy):
    """Answers with more than anybody can print."""

    def order(self, view: SchedulerView) -> Any:
        return [7] * 5_000_000


class Listener(SchedulingPolicy):
    """Remembers what it was told."""

    def __init__(self, options: Any = None, context: Any = None) -> None:
        self.told: list[tuple[int, str]] = []
        self.left: list[int] = []

    def on_added(self, *, slot: int, request: Request) -> None:
        self.told.append((slot, request.request_id))

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        self.left.append(slot)


class _RaisesIn:
    """Raises in the one of its methods that ``where`` names."""

    where = ""
    what: type[BaseException] = ValueError

    def _check(self, method: str) -> None:
        if method == self.where:
            raise self.what("a bug in a plugin")


class RaisingBackend(_RaisesIn, FakeBackend):
    """A backend that does not start."""

    def __init__(self, where: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.where = where

    def load(self, source: Any, *, sampler: Any) -> Any:
        self._check("load")
        return super().load(source, sampler=sampler)

    def allocate(self, plan: Any) -> None:
        self._check("allocate")
        super().allocate(plan)


class ExitingBackend(RaisingBackend):
    """The same, by ``sys.exit``."""

    what = SystemExit


class RaisingShapes(_RaisesIn, ExactShapes):
    """A bucketing without a table."""

    where = "buckets"

    def buckets(self, limits: Any) -> Any:
        self._check("buckets")


class SilentBackend(FakeBackend):
    """A backend that says nothing of its model."""

    def load(self, source: Any, *, sampler: Any) -> Any:
        super().load(source, sampler=sampler)


class Lists(ExactShapes):
    """A bucketing with a table of its own."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def buckets(self, limits: Any) -> Any:
        return self.table


class RaisingDrafter(_RaisesIn, ScriptedSpeculator):
    """A speculator that cannot allocate."""

    where = "allocate"

    def __init__(self) -> None:
        super().__init__(lambda _: [])

    def allocate(self, limits: Any) -> None:
        self._check("allocate")


def raising_connector(where: str) -> ConnectorPair:
    """Return a connector one of whose sides raises at the start."""
    wild = WildConnector()
    pair = wild.pair()

    class Scheduler(type(pair.scheduler)):  # type: ignore[misc] # found at run time
        def on_ready(self, layout: Any) -> None:
            raise ValueError("a bug in a plugin")

    class Worker(type(pair.worker)):  # type: ignore[misc] # the same
        def register(self, kv_cache: Any) -> None:
            raise ValueError("a bug in a plugin")

    if where == "register":
        return ConnectorPair(scheduler=pair.scheduler, worker=Worker(wild))
    return ConnectorPair(scheduler=Scheduler(wild), worker=pair.worker)


HOSTILE = tuple(
    f"support.strategies.hostile_policies:{one.__name__}"
    for one in (Raises, Forgets, Fractions, Starves, Exits, Floods, DeafEars)
)

OPTIONS = {"vocab_size": 4096, "eos": -1, "max_model_len": 256}


def house(**more: Any) -> tuple[Config, Registry]:
    """Return a configuration of a fake engine, and a registry with every installed policy."""
    kit = "trencadis_testing."
    backend = more.pop("backend", {})
    if "name" not in backend:
        backend = {"name": f"{kit}fakes:FakeBackend", "options": OPTIONS | backend}
    tables = {
        "engine": {"warmup": False, **more.pop("engine", {})},
        "backend": backend,
        "executor": {"name": f"{kit}fake_executor:FakeExecutor"},
        "sampling": {"name": f"{kit}backend:ArgmaxSampler"},
        "bucketing": {"name": f"{kit}engines:ExactShapes", "fallback": ""},
        "cache": {"num_blocks": 64, "block_size": 4, **more.pop("cache", {})},
        "observer": {"names": []},
        "scheduling": {"name": "fcfs", "fallback": "fcfs"},
        **more,
    }
    return configure("demo", config_file=None, tables=tables)
