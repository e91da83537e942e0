"""Scheduling policies that misbehave, each in its own way, importable by path; and a house with the real policies on a fake backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from trencadis.config import Config
from trencadis.front import configure
from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Int32Array, Request
from trencadis.registry import Registry


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


class Listener(SchedulingPolicy):
    """Remembers what it was told."""

    def __init__(self, options: Any = None, context: Any = None) -> None:
        self.told: list[tuple[int, str]] = []
        self.left: list[int] = []

    def on_added(self, *, slot: int, request: Request) -> None:
        self.told.append((slot, request.request_id))

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        self.left.append(slot)


HOSTILE = tuple(f"hostile_policies:{one.__name__}" for one in (Raises, Forgets, Fractions, Starves, DeafEars))

OPTIONS = {"vocab_size": 4096, "eos": -1, "max_model_len": 256}


def house(**more: Any) -> tuple[Config, Registry]:
    """Return a configuration of a fake engine, and a registry with every installed policy."""
    kit = "trencadis_testing."
    tables = {
        "engine": {"warmup": False, **more.pop("engine", {})},
        "backend": {"name": f"{kit}fakes:FakeBackend", "options": OPTIONS | more.pop("backend", {})},
        "executor": {"name": f"{kit}fake_executor:FakeExecutor"},
        "sampling": {"name": f"{kit}backend:ArgmaxSampler"},
        "bucketing": {"name": f"{kit}engines:ExactShapes", "fallback": ""},
        "cache": {"num_blocks": 64, "block_size": 4, **more.pop("cache", {})},
        "observer": {"names": []},
        "scheduling": {"name": "fcfs", "fallback": "fcfs"},
        **more,
    }
    return configure("demo", config_file=None, tables=tables)
