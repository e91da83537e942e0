"""What endpoints share: limits, and work on threads."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import EngineEndedError
from trencadis_server.config import ServerConfig
from trencadis_server.context import ServerContext
from trencadis_server.middleware.limits import AdmissionControl


class Restarting:
    """An engine that is replaced, and gone in between."""

    def __init__(self) -> None:
        self.current: Any = None

    @property
    def llm(self) -> Any:
        if self.current is None:
            raise EngineEndedError("the engine is starting again")
        return self.current


def make(engines: Any, **options: Any) -> ServerContext:
    clock = SimulatedClock()
    admission = AdmissionControl(max_requests=1, max_waiting_tokens=1, clock=clock)
    return ServerContext(
        engines, config=ServerConfig(), model_names=("m",), admission=admission, clock=clock, created=1, **options
    )


def test_the_engine_is_always_the_one_of_the_moment() -> None:
    engines = Restarting()
    context = make(engines)
    for access in (lambda: context.llm, lambda: context.fingerprint):
        with pytest.raises(EngineEndedError, match="starting again"):
            access()
    for name in ("first", "second"):
        engines.current = SimpleNamespace(plan_hash=name)
        assert context.llm is engines.current
        assert context.fingerprint == f"fp_{name}"


@pytest.mark.parametrize(("has_tenants", "num_at_once"), [(False, 2), (True, 1)])
def test_where_keys_have_several_names_one_leaves_a_thread_to_the_others(has_tenants: bool, num_at_once: int) -> None:
    async def main() -> int:
        threads = make(Restarting(), has_tenants=has_tenants).encoder
        started: list[threading.Event] = [threading.Event(), threading.Event()]
        done = threading.Event()

        def work(number: int) -> None:
            started[number].set()
            done.wait(10)

        mine = [asyncio.create_task(threads.run(partial(work, i), num_characters=10**6, caller="a")) for i in (0, 1)]
        await asyncio.to_thread(started[num_at_once - 1].wait, 10)
        if has_tenants:
            await threads.run(lambda: None, num_characters=10**6, caller="b")
        num_started = sum(one.is_set() for one in started)
        done.set()
        await asyncio.gather(*mine)
        return num_started

    assert asyncio.run(main()) == num_at_once
