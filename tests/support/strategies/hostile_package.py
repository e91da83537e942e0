"""A third party's package that misbehaves: for each noun a working component, one method of which is spoilt.

Import ``support.strategies.hostile_package:NOUN`` with the options ``method``, ``mode`` and ``first``. The modes:

    raise, none                     an exception; None instead of an answer
    wrong_shape, wrong_dtype        an answer of other lengths, of another type
    out_of_range, too_many          numbers far beyond what is allowed; more than was asked for
    mutate                          writes into every array that it was shown, also into those that are read only
    sleep, loop                     a call that takes too long, a call that never ends
    exit, os_exit                   ends the process, as an exception and at once
    leak                            leaves a thread and some memory with each call
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from trencadis.interfaces import (
    Backend,
    BucketingStrategy,
    ComponentContext,
    ConnectorPair,
    DraftLength,
    EvictionPolicy,
    Executor,
    Observer,
    SchedulingPolicy,
    Speculator,
)
from trencadis_kv.interfaces import KVCodec, KVPolicy

__all__ = ["ACTS", "ANSWER_MODES", "MODES", "PROCESS_MODES", "spoil"]

ANSWER_MODES = ("none", "wrong_shape", "wrong_dtype", "out_of_range", "too_many")
"""Modes that change an answer."""

PROCESS_MODES = ("loop", "exit", "os_exit")
"""Modes that concern the whole process."""

MODES = ("raise", *ANSWER_MODES, "mutate", "sleep", "leak", *PROCESS_MODES)

SLEEP_S = 1.0

ACTS: list[tuple[str, str]] = []
"""What was done so far, by method and mode."""
_LEAKED: list[Any] = []


def spoil(component: Any, *, method: str, mode: str, first: int = 0, last: int = 1 << 62) -> Any:
    """Return the component with one method spoilt, from the ``first`` call to the ``last``, counted from 0."""
    kind, numbers = type(component), itertools.count()
    original = getattr(kind, method)

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not first <= next(numbers) <= last:
            return original(self, *args, **kwargs)
        ACTS.append((method, mode))
        _act(mode)
        answer = original(self, *args, **kwargs)
        if mode == "mutate":
            for value in (*args, *kwargs.values(), answer):
                _overwrite(value)
        return _changed(answer, mode) if mode in ANSWER_MODES else answer

    component.__class__ = type(f"Hostile{kind.__name__}", (kind,), {method: spoilt})
    return component


def _act(mode: str) -> None:
    if mode == "raise":
        raise KeyError("a bug in a plugin")
    if mode == "sleep":
        time.sleep(SLEEP_S)
    if mode == "leak":
        threading.Thread(target=threading.Event().wait, name="leaked", daemon=True).start()
        _LEAKED.append(bytearray(1 << 16))
    if mode == "exit":
        sys.exit(3)
    if mode == "os_exit":
        os._exit(3)
    while mode == "loop":
        pass


def _changed(answer: Any, mode: str) -> Any:
    """Return another answer than the true one, or one where there should be none."""
    if mode == "none" or answer is None:
        return None if mode == "none" else {"wrong_shape": (1, 2), "wrong_dtype": "x"}.get(mode, 1 << 40)
    if attrs.has(type(answer)):
        fields = {one.name: getattr(answer, one.name) for one in attrs.fields(type(answer)) if one.init}
        name = next((name for name, value in fields.items() if hasattr(value, "shape")), next(iter(fields)))
        return attrs.evolve(answer, **{name: _changed(fields[name], mode)})
    if isinstance(answer, tuple) and hasattr(answer, "_replace"):
        return answer._replace(**{answer._fields[0]: _changed(answer[0], mode)})
    if hasattr(answer, "shape"):
        return _changed_array(answer, mode)
    if isinstance(answer, str | bytes | memoryview | bool):
        return {"wrong_shape": [answer], "wrong_dtype": 7, "out_of_range": "\ud800" * 9, "too_many": "x" * 10**7}[mode]
    if isinstance(answer, int | float):
        return {
            "wrong_shape": [answer, answer],
            "wrong_dtype": "many",
            "out_of_range": -(1 << 40),
            "too_many": 1 << 40,
        }[mode]
    if isinstance(answer, list | tuple):
        return {
            "wrong_shape": [[*answer]],
            "wrong_dtype": ["x" for _ in answer] or ["x"],
            "out_of_range": [-(1 << 40) for _ in answer] or [1 << 40],
            "too_many": [*answer] * 1000 or [1] * 1000,
        }[mode]
    return object()


def _changed_array(array: Any, mode: str) -> Any:
    is_numpy = isinstance(array, np.ndarray)
    if mode == "wrong_shape":
        return array[None].repeat(2, axis=0) if is_numpy else array[None].repeat(2, *([1] * array.ndim))
    if mode == "wrong_dtype":
        return array.astype(np.complex64) if is_numpy else array.to(dtype=__import__("torch").complex64)
    if mode == "out_of_range":
        return array * 0 + (1 << 30)
    return np.concatenate([array] * 3) if is_numpy else array.repeat(3, *([1] * (array.ndim - 1)))


def _overwrite(value: Any, depth: int = 0) -> None:
    """Write into every array that hangs together with a value, by force if need be."""
    if depth > 2 or isinstance(value, str | bytes | int | float | type(None)):
        return
    if isinstance(value, memoryview):
        if not value.readonly:
            value.cast("B")[:] = bytes(value.nbytes)
        return
    if isinstance(value, np.ndarray):
        with contextlib.suppress(ValueError):
            value.setflags(write=True)
        if value.flags.writeable and value.dtype.kind in "iufb":
            value[...] = 1
    elif hasattr(value, "fill_") and hasattr(value, "is_inference"):
        value.fill_(1)
    elif isinstance(value, list | dict):
        value.clear()
    elif isinstance(value, tuple | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            _overwrite(one, depth + 1)
    else:
        for name in dir(value):
            if not name.startswith("_"):
                try:
                    inside = getattr(value, name)
                except Exception:
                    continue
                if not callable(inside):
                    _overwrite(inside, depth + 1)


# ------------------------------------------------------------------------------------------------ one of each noun


def scheduling(method: str, mode: str, first: int = 0) -> SchedulingPolicy:
    from trencadis_plugins.scheduling.fcfs import Fcfs

    return spoil(Fcfs(), method=method, mode=mode, first=first)


def eviction(method: str, mode: str, first: int = 0) -> EvictionPolicy:
    from trencadis_plugins.eviction.lru import Lru

    return spoil(Lru(), method=method, mode=mode, first=first)


def bucketing(context: ComponentContext, method: str, mode: str, first: int = 0) -> BucketingStrategy:
    from trencadis_testing.engines import ExactShapes

    return spoil(ExactShapes(), method=method, mode=mode, first=first)


def observer(method: str, mode: str, first: int = 0) -> Observer:
    from trencadis.interfaces import Observer

    class Counter(Observer):
        def on_step(self, stats: Any) -> None:
            pass

        def on_request(self, finished: Any) -> None:
            pass

        def metrics(self) -> str:
            return "hostile_steps_total 1.0\n"

    return spoil(Counter(), method=method, mode=mode, first=first)


def speculation(method: str, mode: str, first: int = 0) -> Speculator:
    from trencadis_testing.doubles import ScriptedSpeculator

    return spoil(ScriptedSpeculator(lambda tokens: [int(tokens[-1])] * 2), method=method, mode=mode, first=first)


def draft_length(method: str, mode: str, first: int = 0) -> DraftLength:
    from trencadis_testing.doubles import AsManyAsMay

    return spoil(AsManyAsMay(), method=method, mode=mode, first=first)


def kv_connector(context: ComponentContext, method: str, mode: str, first: int = 0) -> ConnectorPair:
    side, _, method = method.partition(".")
    from trencadis_kv.connectors.host_offload.host_memory import HostMemory, HostStore
    from trencadis_kv.store.settings import StoreSettings
    from trencadis_kv.store.store_connector import store_connector
    from trencadis_plugins.eviction.lru import Lru

    memory = HostMemory(1 << 28, eviction=Lru(), clock=context.clock)
    pair = store_connector(lambda: HostStore(memory), StoreSettings(), context, name="hostile")
    parts = {"scheduler": pair.scheduler, "worker": pair.worker}
    spoil(parts[side], method=method, mode=mode, first=first)
    return ConnectorPair(**parts)


def kv_policy(method: str, mode: str, first: int = 0) -> KVPolicy:
    from trencadis_kv.interfaces import KVPolicy

    return spoil(KVPolicy(), method=method, mode=mode, first=first)


def kv_codec(method: str, mode: str, first: int = 0) -> KVCodec:
    from trencadis_kv.store.defaults import IdentityCodec

    return spoil(IdentityCodec(), method=method, mode=mode, first=first)


def executor(method: str, mode: str, first: int = 0, last: int = 1 << 62) -> Executor:
    from trencadis_testing.fake_executor import FakeExecutor

    return spoil(FakeExecutor(), method=method, mode=mode, first=first, last=last)


def backend(method: str, mode: str, first: int = 0, last: int = 1 << 62, **options: Any) -> Backend:
    from trencadis_testing.fakes import FakeBackend

    return spoil(FakeBackend(**options), method=method, mode=mode, first=first, last=last)


def honest_speculation() -> Speculator:
    from trencadis_testing.doubles import ScriptedSpeculator

    return ScriptedSpeculator(lambda tokens: [int(tokens[-1])] * 2)
