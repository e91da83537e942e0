"""Replicas in real processes, with fake engines: started together, killed, started again, closed."""

from __future__ import annotations

import os
import signal
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.eventually import eventually
from trencadis.client.factory import open_frontend, open_runner
from trencadis.client.frontend import Frontend
from trencadis.errors import BackendError, ConfigValueError, EngineEndedError, PluginError, TrencadisError
from trencadis.records import SamplingParams
from trencadis.registry import load_with_plugins
from trencadis_remote.process.client import RemoteEngineClient
from trencadis_remote.process.process import EngineProcess
from trencadis_remote.replicas.client import ReplicatedEngineClient
from trencadis_remote.replicas.connect import connect_replicas
from trencadis_remote.replicas.starter import ReplicaStarter
from trencadis_testing.fakes import fake_text


def house(**more: Any) -> Any:
    """A configuration of fake engines whose parts other processes can import."""
    resolved, registry = load_with_plugins(environ={}, overrides={**tables_of_house(), **more})
    return resolved.config, registry


def tables_of_house() -> dict[str, Any]:
    kit = "trencadis_testing."
    return {
        "parallel": {"data": 2},
        "engine": {"warmup": False},
        "router": {"name": "least_loaded"},
        "backend": {
            "name": f"{kit}fakes:FakeBackend",
            "options": {"vocab_size": 4096, "eos": -1, "max_model_len": 20000, "strict": False},
        },
        "executor": {"name": f"{kit}fake_executor:FakeExecutor"},
        "sampling": {"name": "greedy"},
        "bucketing": {"name": f"{kit}engines:ExactShapes", "fallback": ""},
        "cache": {"num_blocks": 4096, "block_size": 16},
        "observer": {"names": []},
    }


def processes(frontend: Frontend) -> list[Any]:
    engine: Any = frontend.engine
    return [replica.client._transport._peer for _, replica in engine.replicas.live]


@pytest.fixture
def close() -> Iterator[Callable[[Frontend], None]]:
    opened: list[Frontend] = []
    yield opened.append
    for frontend in opened:
        frontend.close()


@pytest.mark.nightly
def test_a_caller_that_steps_itself_loses_nothing_and_leaves_no_process(close: Callable[[Frontend], None]) -> None:
    frontend = open_frontend(*house())
    close(frontend)
    assert isinstance(frontend.engine, ReplicatedEngineClient)
    started = processes(frontend)
    clients = [frontend.submit((5, i), SamplingParams(max_tokens=3000), request_id=str(i)) for i in range(4)]
    while min(len(work.tokens) for work in frontend.engine.replicas.work.values()) < 5:
        frontend.step()
    os.kill(started[1].pid, signal.SIGKILL)
    while not all(client.is_finished for client in clients):
        frontend.step()
    assert [list(client.output().outputs[0].token_ids) for client in clients] == [
        fake_text((5, i), 3000, vocab_size=4096) for i in range(4)
    ]
    while len(processes(frontend)) < 2:
        frontend.engine.rest(0.05)
    rows = frontend.control("replicas")["replicas"]
    assert [(row["state"], row["num_restarts"], row["num_moved"]) for row in rows] == [("ready", 0, 0), ("ready", 1, 2)]
    started += processes(frontend)
    frontend.close()
    assert [Path(f"/proc/{one.pid}").exists() for one in started] == [False] * 4


@pytest.mark.nightly
def test_the_error_of_one_replica_is_raised_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    original = EngineProcess.__init__

    def note(self: EngineProcess, **arguments: Any) -> None:
        original(self, **arguments)
        started.append(self.pid)

    monkeypatch.setattr(EngineProcess, "__init__", note)
    with pytest.raises(TrencadisError, match="cache"):
        connect_replicas(*house(cache={"num_blocks": 0, "memory_fraction": 1e-9}))
    assert len(started) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_wrong_routers_and_placements_are_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineProcess, "__init__", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(PluginError, match=r'router\] name = "prefix" .*Choose one of: cache_aware'):
        open_runner(*house(router={"name": "prefix"}))
    with pytest.raises(ConfigValueError, match=r"parallel\.data = 2 engines need a process each"):
        open_frontend(*house(engine={"placement": "thread"}))
    config, registry = house()
    registry.register(types.ModuleType("my_experiment"))
    with pytest.raises(PluginError, match="my_experiment"):
        open_frontend(config, registry)


# --------------------------------------------------------------------------------------------------------- starter


class Ended(RemoteEngineClient):
    """A client that only counts how often it is closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_a_replica_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trencadis_remote.replicas.starter._RETRY_S", 0.0)
    outcomes: list[Any] = [BackendError("no device"), OSError("no process"), Ended()]
    delays: list[float] = []

    def start(replica: int, is_closing: Callable[[], bool]) -> RemoteEngineClient:
        made = outcomes.pop(0)
        if isinstance(made, BaseException):
            raise made
        return made

    starter, ended, ready = ReplicaStarter(start), Ended(), outcomes[-1]
    starter.start(3, ended, delays_s=lambda: delays.append(0.0) or 0.0)
    taken: list[Any] = []
    eventually(lambda: taken.extend(starter.take()) or bool(taken))
    assert taken == [(3, ready)]
    assert (ended.num_closed, ready.num_closed, len(delays)) == (1, 0, 3)
    starter.close()


def test_no_try_is_made_where_none_is_allowed() -> None:
    starter, ended = ReplicaStarter(lambda *_: pytest.fail("it was started")), Ended()
    starter.start(0, ended, delays_s=lambda: None)
    starter.close()
    assert ended.num_closed == 1


def test_closing_ends_waits_and_what_is_being_started() -> None:
    begun = threading.Event()

    def start(replica: int, is_closing: Callable[[], bool]) -> RemoteEngineClient:
        begun.set()
        eventually(is_closing)
        raise EngineEndedError("closed")

    starter, waiting, starting, ready = ReplicaStarter(start), Ended(), Ended(), Ended()
    starter.start(0, waiting, delays_s=lambda: 3600.0)
    starter.start(1, starting, delays_s=lambda: 0.0)
    assert begun.wait(60)
    starter._ready.put((2, ready))  # nobody took it
    starter.close()
    assert (waiting.num_closed, starting.num_closed, ready.num_closed) == (1, 1, 1)
