"""What endpoints share: limits, and work on threads."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import EngineEndedError
from trencadis_server.config import ServerConfig
from trencadis_server.context import Admission, Encoder, EngineSource, ServerContext, context_of
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


def make(engines: Any) -> ServerContext:
    clock = SimulatedClock()
    admission = AdmissionControl(max_requests=1, max_waiting_tokens=1, clock=clock)
    return ServerContext(
        engines, config=ServerConfig(), model_names=("m",), admission=admission, clock=clock, created=1
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


def test_the_servers_own_parts_are_what_endpoints_expect() -> None:
    context = make(Restarting())
    assert isinstance(context.admission, Admission)
    assert isinstance(SimpleNamespace(llm=None), EngineSource)


def test_a_request_finds_the_context_of_its_application() -> None:
    context = make(Restarting())
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(context=context)))
    assert context_of(request) is context


def test_a_short_text_is_encoded_at_once_and_a_long_one_on_a_thread() -> None:
    async def main() -> tuple[int, int]:
        encoder = Encoder()
        short = await encoder.run(threading.get_ident, num_characters=10)
        return short, await encoder.run(threading.get_ident, num_characters=10**6)

    short, long = asyncio.run(main())
    assert short == threading.get_ident()
    assert long != threading.get_ident()


def test_long_texts_wait_for_a_free_thread() -> None:
    running: list[int] = []
    most: list[int] = []
    pair = threading.Barrier(2)
    lock = threading.Lock()

    def work() -> None:
        with lock:
            running.append(1)
            most.append(len(running))
        pair.wait(timeout=10)  # so that two do overlap
        with lock:
            running.pop()

    async def main() -> None:
        encoder = Encoder(max_threads=2)
        await asyncio.gather(*(encoder.run(work, num_characters=10**6) for _ in range(6)))

    asyncio.run(main())
    assert max(most) == 2
