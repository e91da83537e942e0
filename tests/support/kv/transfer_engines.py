"""Engines on a connector that does as a test says, and requests whose prompts it has."""

from __future__ import annotations

from typing import Any

from support.core.invariants import broken_invariants
from support.kv.wild_connector import WildConnector
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.records import FinishedSequence, Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    """Return a request."""
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


def engine_on(wild: WildConnector, **options: Any) -> tuple[Engine, SimulatedClock]:
    """Return an engine whose connector has the prompt already, without a prefix cache of its own."""
    clock = SimulatedClock()
    options = {"prefix_caching": False, "backend": FakeBackend(eos=-1), **options}
    engine = make_engine(connector=wild.pair(), clock=clock, **options)
    for name in ("first", "kick"):  # content is offered at a commit and saved with the next step
        engine.add(request(name, tuple(range(1, 21))))
        while name in engine._state.slot_of:
            engine.step()
            for transfer_id in list(wild.loads):
                wild.arrive(transfer_id)
    engine.step()
    wild.asked.clear()
    return engine, clock


def waiting_for_kv(engine: Engine, wild: WildConnector, name: str = "r") -> int:
    """Add a request whose load starts; return its transfer id."""
    engine.add(request(name, tuple(range(1, 21))))
    engine.step()
    return max(wild.loads)


def ends_well(engine: Engine, name: str = "r") -> FinishedSequence:
    """The request ends with the text it would have had without a connector, and no block is lost."""
    end = drain(engine)[name]
    assert end.token_ids.tolist() == fake_text(tuple(range(1, 21)), 8, eos=-1)
    assert broken_invariants(engine) == []
    return end


def counts(engine: Engine) -> tuple[int, int, int, int]:
    """Return how many loads there were, and how many of them arrived, failed and were given up."""
    transfers = engine.stage("transfer").transfers
    return transfers.num_loads, transfers.num_loaded, transfers.num_failed_loads, transfers.num_cancelled_loads
