"""Two engines on fake backends in one process, which hand prefixes over through real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from support.core.invariants import broken_invariants
from support.kv.p2p_ends import p2p_config
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.engine.sampling.fingerprint import EngineFingerprint
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import FinishedSequence, Request, SamplingParams
from trencadis_kv.connectors.p2p.connector import make_p2p
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

__all__ = ["PREFILL", "Station", "pause", "prompt_of", "true_text", "with_port"]

PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
_PATIENCE_S = 60.0
_BLOCK_SIZE = 4


def pause() -> None:
    threading.Event().wait(0.001)


def prompt_of(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(1 + (seed * 31 + i * 7) % 90 for i in range(num_tokens))


def true_text(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return fake_text(list(prompt), num_tokens, eos=-1)


class Station:
    """One engine with the connector ``p2p``, stepped by hand."""

    def __init__(
        self,
        *,
        any_thread: bool = True,
        wrap: Callable[[ConnectorPair], ConnectorPair] = lambda pair: pair,
        num_blocks: int = 60,
        engine: Mapping[str, Any] | None = None,
        make: Callable[[ComponentContext], ConnectorPair] | None = None,
        **config: Any,
    ) -> None:
        self.clock = SimulatedClock()
        context = ComponentContext(clock=self.clock, seed=0)
        self.pair = make_p2p(p2p_config(**config), context) if make is None else make(context)
        self.node: Any = self.pair.scheduler._node  # type: ignore[attr-defined]
        self.backend = _Backend(any_thread, eos=-1, max_model_len=num_blocks * _BLOCK_SIZE)
        self.engine: Engine = make_engine(
            connector=wrap(self.pair),
            backend=self.backend,
            clock=self.clock,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            warmup=False,
            **{"sampling_fingerprint": EngineFingerprint(b"fake", lambda _: True), **(engine or {})},
        )
        self.ends: dict[str, FinishedSequence] = {}
        self.said: dict[int, list[int]] = {}
        self._num_found: dict[str, int] = {}
        self.step_s = 0.01
        self._num_requests = 0

    def add(self, prompt: tuple[int, ...], *, max_tokens: int, params: Mapping[str, Any] | None = None) -> str:
        self._num_requests += 1
        name = f"request {self._num_requests}"
        self.engine.add(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens),
                transfer_params=params,
            )
        )
        return name

    def step(self) -> None:
        deltas = self.engine.step()
        tokens = iter(deltas.token_ids.tolist())
        for slot, num in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            self.said.setdefault(slot, []).extend(next(tokens) for _ in range(num))
        for end in deltas.finished:
            self.ends[end.request_id] = end
            assert self.said.pop(end.slot, []) == end.token_ids.tolist(), "what was shown is what it ended with"
        table = self.engine._state.table
        for slot in self.engine._state.running.tolist():
            self._num_found[table.sequence(slot).request.request_id] = int(table.num_cached_tokens[slot])
        self.clock.advance(self.step_s)
        assert broken_invariants(self.engine) == []

    def until(self, done: Callable[[], bool]) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while not done():
            assert time.monotonic() < until_s, "it never happens"
            self.step()
            pause()

    def serve(
        self, prompt: tuple[int, ...], *, max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> FinishedSequence:
        name = self.add(prompt, max_tokens=max_tokens, params=params)
        self.until(lambda: name in self.ends)
        return self.ends[name]

    def prefill(self, prompt: tuple[int, ...]) -> dict[str, Any]:
        """Compute a prompt for another station; returns what that is told."""
        params = self.serve(prompt, max_tokens=1, params=PREFILL).transfer_params
        assert params is not None, "nothing is held"
        return dict(params)

    def num_found(self, end: FinishedSequence) -> int:
        """Return how many tokens of a request were not computed here, but cached or loaded; more than one token was to be made."""
        return self._num_found[end.request_id]

    @property
    def num_used_blocks(self) -> int:
        return self.engine._state.blocks.num_used

    def count(self, name: str, **labels: str) -> float:
        value: float = self.node.metrics.value(f"{name}_total", **labels)
        return value

    def close(self) -> None:
        self.engine.close()
        self.pair.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Backend(FakeBackend):
    """Shows its pool as one of a device with a thread of its own, if that is asked for."""

    def __init__(self, any_thread: bool, **options: Any) -> None:
        super().__init__(**options)
        self._any_thread = any_thread
        self._owner = threading.get_ident()

    def kv_cache(self) -> Any:
        pool = super().kv_cache()
        if not self._any_thread:
            pool.any_thread = False
            for name in ("read_blocks", "write_blocks"):
                setattr(pool, name, self._only_here(getattr(pool, name)))
        return pool

    def _only_here(self, copy: Callable[..., None]) -> Callable[..., None]:
        def checked(*arguments: Any) -> None:
            assert threading.get_ident() == self._owner, "the pool was touched from another thread"
            copy(*arguments)

        return checked


def with_port(params: Mapping[str, Any], port: int) -> dict[str, Any]:
    return {**params, "remote_port": port}
