"""Both ends of the connection to an engine's process, in one thread."""

from __future__ import annotations

import socket
from typing import Any

import attrs

from trencadis.clock import SystemClock
from trencadis_remote.process.channel import Channel
from trencadis_remote.process.client import RemoteEngineClient
from trencadis_remote.process.messages import ReadyMessage
from trencadis_remote.process.transport import Transport
from trencadis_remote.process.worker import EngineWorker
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

__all__ = ["FakePeer", "Line", "LineOpener"]


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


class LineOpener:
    """Opens lines, and closes all of them."""

    def __init__(self) -> None:
        self._opened: list[Line] = []

    def __call__(
        self,
        *,
        room: int | None = None,
        never_waits: bool = False,
        sends_load: bool = False,
        engine: Any = None,
        **options: Any,
    ) -> Line:
        """Return a line; ``options`` are of :func:`make_engine`, unless an engine is given; ``room``: bytes that a socket holds."""
        ends = socket.socketpair()
        near, far = Channel(ends[0], never_waits=never_waits), Channel(ends[1])
        for end in ends if room is not None else ():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        backend = FakeBackend(vocab_size=4096, eos=-1, max_model_len=1024, strict=False)
        engine = engine or make_engine(**{"backend": backend, "num_blocks": 512, **options})
        peer = FakePeer()
        transport = Transport(near, peer, clock=SystemClock())
        ready = ReadyMessage(
            model=engine.model,
            max_model_len=engine.max_model_len,
            plan_hash="x",
            hashing=engine.hashing if sends_load else None,
        )
        worker = EngineWorker(engine, far, load_clock=SystemClock() if sends_load else None)
        line = Line(
            client=RemoteEngineClient(transport, ready),
            worker=worker,
            engine=engine,
            peer=peer,
            transport=transport,
            far=far,
        )
        self._opened.append(line)
        return line

    def close(self) -> None:
        """Close every line."""
        for line in self._opened:
            line.peer.end()
            line.client.close()
            line.far.close()
            line.engine.close()
