"""Engines without a model in real child processes, and both ends of a line in one thread."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from trencadis.client.factory import configure
from trencadis.client.process.channel import Channel
from trencadis.client.process.client import RemoteEngineClient
from trencadis.client.process.conversion import ready_message
from trencadis.client.process.transport import Transport
from trencadis.client.process.worker import EngineWorker
from trencadis.clock import SystemClock
from trencadis.config import Config
from trencadis.registry import Registry
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

OPTIONS = {"vocab_size": 4096, "eos": -1, "max_model_len": 20000, "strict": False}


def tables(**more: Any) -> dict[str, Any]:
    """Tables of a fake engine whose parts another process can import."""
    kit = "trencadis_testing."
    return {
        "engine": {"placement": "process", "warmup": False, **more.pop("engine", {})},
        "backend": {"name": f"{kit}fakes:FakeBackend", "options": OPTIONS},
        "executor": {"name": f"{kit}fake_executor:FakeExecutor"},
        "sampling": {"name": f"{kit}backend:ArgmaxSampler"},
        "bucketing": {"name": f"{kit}engines:ExactShapes", "fallback": ""},
        "cache": {"num_blocks": 4096, "block_size": 16},
        "observer": {"names": ["support.core.remote_parts:StepCounter"]},
        **more,
    }


@pytest.fixture
def process_house() -> Callable[..., tuple[Config, Registry]]:
    """Makes a configuration and a registry of a fake engine in a process of its own."""

    def make(**more: Any) -> tuple[Config, Registry]:
        return configure("demo", config_file=None, tables=tables(**more))

    return make


class FakePeer:
    """A process that ends when it is told to."""

    def __init__(self) -> None:
        self._mine, self._its = socket.socketpair()
        self.stalled = ""
        self.progress = (0, None)
        self.was_closed = False

    def fileno(self) -> int:
        return self._mine.fileno()

    def end(self) -> None:
        self._its.close()

    def describe_end(self) -> str:
        return "ended in a test"

    def close(self) -> None:
        self.was_closed = True
        self._its.close()
        self._mine.close()


@attrs.frozen(kw_only=True)
class Line:
    """Both ends of a line: a client, and a worker with a fake engine, in one thread."""

    client: RemoteEngineClient
    worker: EngineWorker
    engine: Any
    peer: FakePeer
    transport: Transport
    far: Channel
    refused: list[tuple[str, Exception]] = attrs.field(factory=list)

    def settle(self) -> list[Any]:
        """Let both work until neither has anything to do; returns the outputs of every step."""
        outputs = []
        answers: list[str] = []
        self.client.request_metrics(answers.append)
        for _ in range(5000):
            self.worker.turn()
            if self.client.has_work:
                outputs.append(self.client.step(timeout_s=0.001))
                self.refused.extend(outputs[-1].refused)
            elif answers:
                return outputs
            else:
                self.client.rest(0.001)
        raise AssertionError("the line does not come to rest")


@pytest.fixture
def open_line(tmp_path: Path) -> Iterator[Callable[..., Line]]:
    opened: list[Line] = []

    def make(
        *,
        high_water_mark: int = 64,
        never_waits: bool = False,
        **options: Any,
    ) -> Line:
        address = f"ipc://{tmp_path}/line{len(opened)}"
        near = Channel(address, binds=True, high_water_mark=high_water_mark, never_waits=never_waits)
        far = Channel(address, binds=False, high_water_mark=high_water_mark)
        backend = FakeBackend(vocab_size=4096, eos=-1, max_model_len=1024, strict=False)
        engine = make_engine(backend=backend, num_blocks=512, **options)
        peer = FakePeer()
        transport = Transport(near, peer, clock=SystemClock())
        ready = ready_message(engine.model, max_model_len=engine.max_model_len, plan_hash="x")
        worker = EngineWorker(engine, far)
        line = Line(
            client=RemoteEngineClient(transport, ready),
            worker=worker,
            engine=engine,
            peer=peer,
            transport=transport,
            far=far,
        )
        opened.append(line)
        return line

    yield make
    for line in opened:
        line.peer.end()
        line.client.close()
        line.far.close()
        line.engine.close()
