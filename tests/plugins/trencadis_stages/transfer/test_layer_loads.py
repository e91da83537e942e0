"""Sequences run beside loads that come layer by layer; what did not come costs a recomputation and shows nobody a wrong token."""

from __future__ import annotations

from typing import Any

import pytest

from support.core.invariants import broken_invariants
from support.kv.wild_connector import WildConnector
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.records import FinishedSequence, Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 23))
"""Five full blocks, and two tokens."""


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


def engine_on(wild: WildConnector, **options: Any) -> Engine:
    """Return an engine without a prefix cache, whose connector has the prompt already, and lets it come by layer."""
    backend = FakeBackend(eos=-1, **options.pop("backend", {}))
    engine = make_engine(connector=wild.pair(), **{"prefix_caching": False, "backend": backend, **options})
    engine.add(request("first"))
    while "first" in engine.inspect().sequences:
        engine.step()
    engine.step()
    wild.by_layer = True
    return engine


def settle(engine: Engine, wild: WildConnector) -> dict[str, FinishedSequence]:
    """Step to the end; loads that were given up are released, those that park a sequence arrive."""
    ends: dict[str, FinishedSequence] = {}
    for _ in range(200):
        if not engine.has_work:
            return ends
        ends |= {end.request_id: end for end in engine.step().finished}
        assert broken_invariants(engine) == []
        for transfer_id in list(wild.cancelled):
            wild.scribble(transfer_id)
            wild.release(transfer_id)
        for transfer_id in list(wild.loads):
            if transfer_id not in wild.layered:
                wild.arrive(transfer_id)
    raise AssertionError("it never ends")


def ends_well(
    engine: Engine, wild: WildConnector, name: str = "r", prompt: tuple[int, ...] = PROMPT
) -> FinishedSequence:
    end = settle(engine, wild)[name]
    assert end.token_ids.tolist() == fake_text(prompt, 8, eos=-1)
    assert broken_invariants(engine) == []
    return end


@pytest.fixture
def wild() -> WildConnector:
    return WildConnector()


def test_sequence_runs_at_once_and_its_layers_are_waited_for_in_order(wild: WildConnector) -> None:
    engine = engine_on(wild)
    engine.add(request())
    engine.step()
    assert engine.num_running == 1, "no sequence waits for remote KV"
    (transfer_id,) = {transfer_id for transfer_id, _ in wild.waited}
    assert wild.waited == [(transfer_id, layer) for layer in range(3)]
    assert ends_well(engine, wild).num_cached_tokens == 20
    assert wild.waited == [(transfer_id, layer) for layer in range(3)], "one step waited, no other"
    assert engine.stage("transfer").transfers.num_loaded == 1


@pytest.mark.parametrize(
    ("backend", "by_layer"), [({"layerwise_kv": False}, True), ({}, False)], ids=["backend cannot", "not asked for"]
)
def test_load_parks_its_sequence_where_it_cannot_come_by_layer(
    wild: WildConnector, backend: dict[str, Any], by_layer: bool
) -> None:
    engine = engine_on(wild, backend=backend)
    wild.by_layer = by_layer
    engine.add(request())
    engine.step()
    assert engine.num_waiting == 1
    assert not wild.layered, "nobody is told that steps wait"
    wild.arrive(max(wild.loads))
    assert ends_well(engine, wild).num_cached_tokens == 20
    assert wild.waited == []


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("fate", ["fails", "stalls", "raises"])
def test_load_that_does_not_come_is_void_and_shows_nobody_a_token(
    wild: WildConnector, fate: str, layer: int, async_scheduling: bool
) -> None:
    engine = engine_on(wild, async_scheduling=async_scheduling)
    engine.add(request("beside", (5, 6, 7), max_tokens=30))
    engine.step()
    wild.fate, wild.fate_layer = fate, layer
    slot = engine.add(request())
    told: list[int] = []
    for _ in range(200):
        deltas = engine.step()
        assert broken_invariants(engine) == []
        for transfer_id in list(wild.cancelled):
            wild.scribble(transfer_id)
            wild.release(transfer_id)
        at = 0
        for who, count in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            told += deltas.token_ids[at : at + count].tolist() if who == slot else []
            at += count
        for end in deltas.finished:
            prompt = PROMPT if end.request_id == "r" else (5, 6, 7)
            assert end.token_ids.tolist() == fake_text(prompt, len(end.token_ids), eos=-1)
            assert end.num_preemptions == (end.request_id == "r"), "who decodes beside it goes on"
            assert end.num_cached_tokens == 0
        if not engine.has_work:
            break
    assert told == fake_text(PROMPT, 8, eos=-1)
    transfers = engine.stage("transfer").transfers
    assert transfers.layered.num_discarded == 1
    assert transfers.num_failed_loads + transfers.num_loaded == 1
    assert engine.inspect().blocks.num_used == 0


def test_what_a_load_has_brought_too_late_is_kept_and_found_by_the_next_attempt(wild: WildConnector) -> None:
    engine = engine_on(wild, prefix_caching=True)
    engine._state.blocks.reset_cache()
    wild.fate = "raises"
    engine.add(request())
    assert ends_well(engine, wild).num_preemptions == 1
    assert len(engine._state.blocks.longest_hit(list(wild.store))) >= 5
    assert engine.totals.num_failed_steps == 0


def test_blocks_are_nobody_elses_before_the_load_is_reported(wild: WildConnector) -> None:
    """A second request with the same prompt is planned while the first one's step is in flight."""
    engine = engine_on(wild, prefix_caching=True)
    engine._state.blocks.reset_cache()
    wild.fate, wild.fate_layer = "fails", 1
    num_saved = len(wild.store)
    engine.add(request("a"))
    assert engine._submit_next()
    assert engine._state.blocks.longest_hit(list(wild.store)) == []
    wild.by_layer = False
    engine.add(request("b"))
    engine.step()
    assert engine._state.blocks.longest_hit(list(wild.store)) == []
    for end in settle(engine, wild).values():
        assert end.token_ids.tolist() == fake_text(PROMPT, 8, eos=-1)
    assert len(wild.store) >= num_saved


def test_computed_blocks_are_offered_once_the_load_behind_them_is_there(wild: WildConnector) -> None:
    engine = engine_on(wild)
    longer = (*PROMPT, *range(40, 60))
    engine.add(request("r", longer))
    ends_well(engine, wild, "r", longer)
    assert engine.stage("transfer").transfers.num_loaded == 1
    assert len(wild.store) >= len(longer) // 4, "what was computed behind the loaded blocks was saved"


@pytest.mark.parametrize("fate", ["comes", "fails", "stalls", "raises"])
def test_prompt_in_several_chunks_is_computed_beside_its_load(wild: WildConnector, fate: str) -> None:
    longer = (*PROMPT, *range(40, 60))
    engine = engine_on(wild, max_num_batched_tokens=8)
    wild.fate = fate
    engine.add(request("r", longer))
    ends_well(engine, wild, "r", longer)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("fate", ["stalls", "raises"])
def test_token_in_flight_is_nobodys_when_a_sequence_is_preempted_beside_its_load(
    wild: WildConnector, fate: str, preemption: str
) -> None:
    engine = engine_on(wild, preemption=preemption)
    wild.fate = fate
    slot = engine.add(request())
    assert engine._submit_next()
    engine._state.preempt(engine._state.table.sequence(slot))
    swap = engine.inspect().stages.get("swap")
    assert swap is None or not swap.held, "what is not there is not kept"
    assert ends_well(engine, wild).num_preemptions == 1


def test_load_beside_which_a_request_is_aborted_keeps_its_blocks_until_it_is_released(wild: WildConnector) -> None:
    engine = engine_on(wild)
    wild.fate = "stalls"
    engine.add(request())
    assert engine._submit_next()
    engine.abort("r")
    (transfer_id,) = wild.cancelled
    for _ in range(3):
        engine.step()
    transfers = engine.stage("transfer").transfers
    assert (transfers.num_pinned_blocks, engine.inspect().blocks.num_used) == (5, 5)
    assert transfers.num_cancelled_loads == 1
    wild.scribble(transfer_id)
    wild.release(transfer_id)
    settle(engine, wild)
    assert engine.inspect().blocks.num_used == 0


def test_connector_that_is_closed_for_its_blocks_voids_what_runs_beside_it(wild: WildConnector) -> None:
    clock = SimulatedClock()
    engine = engine_on(wild, clock=clock, release_timeout_s=10.0)
    wild.fate = "stalls"
    engine.add(request("a"))
    assert engine._submit_next()
    engine.abort("a")
    engine.step()
    clock.advance(10.0)
    engine.add(request("r"))
    engine.step()
    assert wild.is_closed == [True, True]
    ends_well(engine, wild)
    assert engine.inspect().blocks.num_used == 0


@pytest.mark.parametrize("name", ["on_allocated", "on_layerwise"])
def test_load_that_could_not_be_begun_is_given_up_and_may_write_all_the_same(wild: WildConnector, name: str) -> None:
    engine = engine_on(wild)
    wild.raising = {name}
    engine.add(request())
    engine.step()
    wild.raising = set()
    assert ends_well(engine, wild).num_cached_tokens == 0


def test_second_attempt_of_a_sequence_waits_for_kv(wild: WildConnector) -> None:
    engine = engine_on(wild)
    wild.answer, wild.fate = "retry", "fails"
    engine.add(request())
    for _ in range(5):
        engine.step()
    assert engine.num_waiting == 1
    wild.arrive(max(wild.loads))
    assert ends_well(engine, wild).num_preemptions == 1
