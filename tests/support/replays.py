"""Engines whose steps are recorded under random loads, and the replays of their records."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trencadis.api import Engine, Registry, build_engine, load_with_plugins
from trencadis.clock import SimulatedClock
from trencadis.config import load_config
from trencadis.config.load import ConfigFile
from trencadis.errors import RequestRefusedError
from trencadis.interfaces import Executor
from trencadis.records import Request, SamplingParams
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend
from trencadis_tools.recorder.flight_record import FlightRecord, decode_flight_record, encode_flight_record
from trencadis_tools.replay import ReplayedSteps, replay_exactly
from trencadis_tools.replay.replayed_engine import recorder_of

__all__ = ["TickingClock", "record_of", "recording_engine", "replayed", "serve_at_random"]

BLOCK_SIZE = 4


class TickingClock(SimulatedClock):
    """Goes on with every reading, by some microseconds that a seed decides."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(100.0)
        self._draws = random.Random(seed)

    def now_s(self) -> float:
        self.advance(self._draws.uniform(1e-6, 2e-3))
        return super().now_s()


@lru_cache(maxsize=1)
def plugins() -> Registry:
    return load_with_plugins(environ={}, overrides={})[1]


def recording_engine(
    seed: int = 0,
    *,
    backend: FakeBackend | None = None,
    executor: Executor | None = None,
    config: Mapping[str, Any] | None = None,
) -> Engine:
    """Return an engine of the real plugins on a fake backend, too small for what comes: 8 rows, 24 blocks of 4 tokens."""
    given = {
        "model.path": "demo",
        "engine.max_num_seqs": 8,
        "engine.max_num_batched_tokens": 40,
        "cache.num_blocks": 24,
        "cache.block_size": BLOCK_SIZE,
        "observer.names": [],
        **(config or {}),
    }
    registry = plugins()
    resolved = load_config(settings=registry.settings, environ={}, overrides=given)
    backend = backend or FakeBackend(max_model_len=80, strict=False)
    engine = build_engine(
        resolved.config, registry=registry, clock=TickingClock(seed), executor=executor or FakeExecutor(backend)
    )
    assert isinstance(engine, Engine)
    return engine


def serve_at_random(engine: Engine, seed: int, *, num_rounds: int, first: int = 0) -> None:
    """Let requests come, be given up and be found complete between steps: three tenants, shared beginnings, second turns."""
    draws, texts = random.Random(seed), [[3] * 20]
    names: list[str] = []
    for _ in range(num_rounds):
        for _ in range(draws.choice((0, 0, 1, 2))):
            head = draws.choice(texts)
            prompt = head[: draws.randrange(len(head) + 1)] + [
                draws.randrange(4, 9) for _ in range(draws.randint(1, 20))
            ]
            texts.append(prompt[:60])
            names.append(f"request-{first + len(names)}")
            params = SamplingParams(max_tokens=draws.randint(1, 25))
            request = Request(
                request_id=names[-1],
                prompt_token_ids=tuple(prompt[:70]),
                params=params,
                tenant=draws.choice(("ann", "bob", "cem")),
                priority=draws.randrange(3),
                cache_salt=draws.choice(("", "a secret")),
                ttft_target_s=draws.choice((0.05, 0.5, 5.0)),
            )
            with contextlib.suppress(RequestRefusedError):
                engine.add(request)
        if names and draws.random() < 0.08:
            (engine.abort if draws.random() < 0.5 else engine.stop)(draws.choice(names))
        if engine.has_work:
            texts += [[4] * 3 + ended.token_ids.tolist()[:40] for ended in engine.step().finished]


def record_of(engine: Engine) -> FlightRecord:
    """Return the engine's record as a file gives it back."""
    return decode_flight_record(encode_flight_record(recorder_of(engine).record(reason="request")))


def replayed(record: FlightRecord) -> ReplayedSteps:
    """Replay a record with the plugins that are loaded."""
    assert not record.obstacles
    registry = plugins()
    file = ConfigFile(record.config, name="the record")
    return replay_exactly(record, load_config(settings=registry.settings, file=file, environ={}).config, registry)
