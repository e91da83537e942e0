"""Replicas with fake engines in this thread, which end when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.core.lines import Line, LineOpener
from trencadis.clock import SimulatedClock
from trencadis.config.schema import Config, ParallelConfig, RouterConfig
from trencadis.engine.cache.hashing import BlockHasher
from trencadis.errors import TrencadisError
from trencadis.interfaces import Router
from trencadis.processes import RestartLimit
from trencadis.records import Request, SamplingParams
from trencadis_remote.process.channel import WakeUpFile
from trencadis_remote.process.client import RemoteEngineClient
from trencadis_remote.replicas.client import ReplicatedEngineClient
from trencadis_remote.replicas.connect import make_mover
from trencadis_remote.replicas.guarded_router import GuardedRouter
from trencadis_remote.replicas.routing import Routing
from trencadis_testing.fakes import FakeBackend, fake_text

__all__ = ["PROMPT", "TEXT", "FakeStarter", "Fleet", "request_of"]

PROMPT = (5, 6, 7)
TEXT = fake_text(PROMPT, 40, vocab_size=4096, eos=-1)


class FakeStarter:
    """Starts nothing until the test does."""

    def __init__(self) -> None:
        self._file = WakeUpFile()
        self.begun: list[tuple[int, float | None]] = []
        self._ready: list[tuple[int, RemoteEngineClient]] = []
        self.is_closed = False

    def fileno(self) -> int:
        return self._file.fileno()

    def start(self, replica: int, ended: RemoteEngineClient, *, delays_s: Callable[[], float | None]) -> None:
        ended.close()
        self.begun.append((replica, delays_s()))

    def ready(self, replica: int, client: RemoteEngineClient) -> None:
        self._ready.append((replica, client))
        self._file.wake()

    def take(self) -> list[tuple[int, RemoteEngineClient]]:
        self._file.clear()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        self.is_closed = True
        self._file.close()


def a_backend() -> FakeBackend:
    return FakeBackend(vocab_size=4096, eos=-1, max_model_len=1024)


class Fleet:
    """Replicas, their client, and what it has put out."""

    def __init__(
        self,
        open_line: LineOpener,
        count: int,
        router: Router,
        parts: Callable[[], dict[str, Any]],
        limits: dict[str, Any],
        **options: Any,
    ) -> None:
        self.open = lambda: open_line(sends_load=True, backend=a_backend(), **parts(), **options)
        self.lines: list[Line | None] = [self.open() for _ in range(count)]
        self.starter, self.clock = FakeStarter(), SimulatedClock()
        first = self.lines[0]
        assert first is not None
        hasher = BlockHasher(key="", compatibility=first.engine.hashing[0], block_size=first.engine.hashing[1])
        guarded = GuardedRouter("router", router)
        self.routing = Routing(guarded, num_replicas=count, clock=self.clock, hasher=hasher)
        config = Config(parallel=ParallelConfig(data=count), router=RouterConfig(**limits))
        self.mover = make_mover(config, guarded, self.routing, clock=self.clock)
        self.client = ReplicatedEngineClient(
            [line.client for line in self.lines if line is not None],
            routing=self.routing,
            starter=self.starter,
            make_limit=lambda: RestartLimit(max_restarts=1, window_s=60.0, now_s=self.clock.now_s),
            mover=self.mover,
        )
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.refused: dict[str, TrencadisError] = {}
        self.embedded: list[str] = []

    def turn(self) -> None:
        """Let each engine take a step, and the client all that comes of it."""
        for line in self.lines:
            if line is not None:
                line.worker.turn()
                if not line.engine.has_work and line.worker._has_new_load:
                    line.worker._send_load()
        self.take()

    def take(self) -> None:
        self.client.rest(0.001)
        while self.client.has_outputs:
            outputs = self.client.step(timeout_s=0.0)
            end = 0
            for slot, count in zip(outputs.slots, outputs.num_tokens, strict=True):
                self.tokens.setdefault(slot, []).extend(outputs.token_ids[end : end + count])
                end += count
            self.finished |= {one.request_id: one for one in outputs.finished}
            self.refused |= dict(outputs.refused)
            self.embedded += [one.request_id for one in outputs.embeddings]

    def until(self, is_reached: Callable[[], bool]) -> None:
        for _ in range(3000):
            if is_reached():
                return
            self.turn()
        raise AssertionError(f"it is never reached: {self.client.replicas.work}, {self.finished}, {self.refused}")

    def kill(self, replica: int) -> None:
        """End a replica; what it has sent is still to be received."""
        line = self.lines[replica]
        assert line is not None
        self.lines[replica] = None
        line.peer.end()

    def revive(self, replica: int) -> None:
        line = self.lines[replica] = self.open()
        self.starter.ready(replica, line.client)
        self.take()

    def ask(self, name: str, **arguments: Any) -> Any:
        answers: list[Any] = []
        self.client.control(name, arguments, answers.append)
        self.until(lambda: bool(answers))
        if isinstance(answers[0], TrencadisError):
            raise answers[0]
        return answers[0]

    def where(self, request_id: str) -> int:
        return self.client.replicas.work[request_id].replica


def request_of(name: str, *, prompt: tuple[int, ...] = PROMPT, num_tokens: int = 40, **params: Any) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=num_tokens, **params))
