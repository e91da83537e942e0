"""Sequences run beside loads that come layer by layer; what did not come costs a recomputation and shows nobody a wrong token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from wild_connector import WildConnector

from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import FinishedSequence, Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.invariants import broken_invariants

PROMPT = tuple(range(1, 23))
"""Five full blocks, and two tokens."""
FATES = ["comes", "fails", "stalls", "raises"]


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


def engine_on(wild: WildConnector, **options: Any) -> Engine:
    """Return an engine without a prefix cache, whose connector has the prompt already, and lets it come by layer."""
    backend = FakeBackend(eos=-1, **options.pop("backend", {}))
    engine = make_engine(connector=wild.pair(), **{"prefix_caching": False, "backend": backend, **options})
    engine.add(request("first"))
    while "first" in engine._state.slot_of:
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
        for ticket in list(wild.cancelled):
            wild.scribble(ticket)
            wild.release(ticket)
        for ticket in list(wild.loads):
            if ticket not in wild.layered:
                wild.arrive(ticket)
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
    assert engine.num_running == 1, "nobody is parked"
    (ticket,) = {ticket for ticket, _ in wild.waited}
    assert wild.waited == [(ticket, layer) for layer in range(3)]
    assert ends_well(engine, wild).num_cached_tokens == 20
    assert wild.waited == [(ticket, layer) for layer in range(3)], "one step waited, no other"
    assert engine._state.transfers.num_loaded == 1


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
        for ticket in list(wild.cancelled):
            wild.scribble(ticket)
            wild.release(ticket)
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
    transfers = engine._state.transfers
    assert transfers.layered.num_voided == 1
    assert transfers.num_failed_loads + transfers.num_loaded == 1
    assert engine._state.blocks.num_used == 0


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
    assert engine._state.transfers.num_loaded == 1
    assert len(wild.store) >= len(longer) // 4, "what was computed behind the loaded blocks was saved"


@pytest.mark.parametrize("fate", FATES)
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
    assert engine._state.swapping.num_swapped == 0, "what is not there is not kept"
    assert ends_well(engine, wild).num_preemptions == 1


def test_load_beside_which_a_request_is_aborted_keeps_its_blocks_until_it_is_released(wild: WildConnector) -> None:
    engine = engine_on(wild)
    wild.fate = "stalls"
    engine.add(request())
    assert engine._submit_next()
    engine.abort("r")
    (ticket,) = wild.cancelled
    for _ in range(3):
        engine.step()
    transfers = engine._state.transfers
    assert (transfers.num_held_blocks, engine._state.blocks.num_used) == (5, 5)
    assert transfers.num_cancelled_loads == 1
    wild.scribble(ticket)
    wild.release(ticket)
    settle(engine, wild)
    assert engine._state.blocks.num_used == 0


def test_connector_that_is_closed_for_its_blocks_voids_what_runs_beside_it(wild: WildConnector) -> None:
    clock = SimulatedClock()
    engine = engine_on(wild, clock=clock, quarantine_s=10.0)
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
    assert engine._state.blocks.num_used == 0


@pytest.mark.parametrize("name", ["on_allocated", "on_layerwise"])
def test_load_that_could_not_be_begun_is_given_up_and_may_write_all_the_same(wild: WildConnector, name: str) -> None:
    engine = engine_on(wild)
    wild.raising = {name}
    engine.add(request())
    engine.step()
    wild.raising = set()
    assert ends_well(engine, wild).num_cached_tokens == 0


def test_second_attempt_of_a_sequence_is_parked(wild: WildConnector) -> None:
    engine = engine_on(wild)
    wild.answer, wild.fate = "retry", "fails"
    engine.add(request())
    for _ in range(5):
        engine.step()
    assert engine.num_waiting == 1
    wild.arrive(max(wild.loads))
    assert ends_well(engine, wild).num_preemptions == 1


class Impatient(SchedulingPolicy):
    """Lets whoever came last go first."""

    preempts = True

    def give_way(self, view: Any, *, slot: int, candidates: Any) -> int:
        return int(candidates[-1]) if view.priority[slot] < view.priority[candidates[-1]] else -1


class LayerMachine(RuleBasedStateMachine):
    """Whatever becomes of layers, with preemption, swaps, aborts and late writes: no wrong token is shown, no block is lost."""

    @initialize(
        prefix_caching=st.booleans(),
        answer=st.sampled_from(["compute", "retry"]),
        num_blocks=st.integers(16, 40),
        preemption=st.sampled_from(["recompute", "swap"]),
        preempts=st.booleans(),
        budget=st.sampled_from([12, 64]),
        async_scheduling=st.booleans(),
    )
    def build(
        self,
        prefix_caching: bool,
        answer: str,
        num_blocks: int,
        preemption: str,
        preempts: bool,
        budget: int,
        async_scheduling: bool,
    ) -> None:
        self.wild = WildConnector(answer=answer)
        self.wild.by_layer = True
        self.clock = SimulatedClock()
        self.engine = make_engine(
            connector=self.wild.pair(),
            backend=FakeBackend(eos=-1, max_model_len=40),
            policy=Impatient() if preempts else None,
            clock=self.clock,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
            preemption=preemption,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            async_scheduling=async_scheduling,
            quarantine_s=1e6,
        )
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.texts: dict[int, tuple[str, list[int]]] = {}
        self.ended: set[str] = set()

    @rule(length=st.integers(8, 24), family=st.integers(0, 1), priority=st.integers(0, 2))
    def arrive(self, length: int, family: int, priority: int) -> None:
        name = str(len(self.prompts))
        self.prompts[name] = tuple((5 * i + family) % 97 for i in range(1, length + 1))
        params = SamplingParams(max_tokens=6)
        slot = self.engine.add(
            Request(request_id=name, prompt_token_ids=self.prompts[name], params=params, priority=priority)
        )
        self.texts[slot] = (name, [])

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.clock.advance(0.05)
            deltas = self.engine.step()
            at = 0
            for slot, count in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
                name, text = self.texts[slot]
                text += deltas.token_ids[at : at + count].tolist()
                at += count
                assert text == fake_text(self.prompts[name], 6, eos=-1)[: len(text)], "a wrong token was shown"
            self.ended |= {end.request_id for end in deltas.finished}

    @rule(fate=st.sampled_from(FATES), layer=st.integers(0, 2), by_layer=st.booleans())
    def choose_fate(self, fate: str, layer: int, by_layer: bool) -> None:
        self.wild.fate, self.wild.fate_layer, self.wild.by_layer = fate, layer, by_layer

    @rule(pick=st.integers(0, 9), num_valid=st.integers(-1, 4))
    def parked_load_ends(self, pick: int, num_valid: int) -> None:
        parked = sorted(ticket for ticket in self.wild.loads if ticket in self.engine._state.transfers._parked)
        if parked:
            ticket = parked[pick % len(parked)]
            if num_valid < 0:
                self.wild.arrive(ticket)
            else:
                self.wild.fail(ticket, min(num_valid, len(self.wild.loads[ticket][0])))

    @rule(pick=st.integers(0, 9), releases=st.booleans())
    def cancelled_load_moves(self, pick: int, releases: bool) -> None:
        waiting = sorted(self.wild.cancelled)
        if waiting:
            ticket = waiting[pick % len(waiting)]
            self.wild.scribble(ticket)
            if releases:
                self.wild.release(ticket)

    @rule(name=st.sampled_from(["lookup", "on_allocated", "on_layerwise", "on_computed", "on_failed", "on_cancelled"]))
    def call_raises(self, name: str) -> None:
        self.wild.raising = {name}
        self.step(1)
        self.wild.raising = set()

    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        live = sorted(self.engine._state.slot_of)
        if live:
            name = live[pick % len(live)]
            self.engine.abort(name)
            self.ended.add(name)

    @rule()
    def plan_ahead(self) -> None:
        """Have a step in flight when the next rule comes."""
        if len(self.engine._in_flight) < self.engine._depth:
            self.engine._submit_next()

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert broken_invariants(self.engine) == []
        state = self.engine._state
        transfers = state.transfers
        ended = transfers.num_loaded + transfers.num_failed_loads + transfers.num_cancelled_loads
        assert transfers.num_loads == ended + transfers.num_parked + len(transfers.layered)
        assert self.engine.totals.num_failed_steps == 0, "a sequence read what is not its own"
        for block_hash, block in state.blocks._block_of.items():
            for array, content in zip(self.wild.content(block), self.wild.store.get(block_hash, ()), strict=False):
                assert (array == content).all(), "a block that was never verified can be found"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(400):
            if not self.engine.has_work:
                break
            for ticket in list(self.wild.loads):
                if ticket in self.engine._state.transfers._parked:
                    self.wild.arrive(ticket)
            for ticket in list(self.wild.cancelled):
                self.wild.release(ticket)
            self.step(1)
        assert not self.engine.has_work
        assert self.engine._state.blocks.num_used == 0, "every block comes back"
        assert self.ended == set(self.prompts)


LayerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestLayerMachine = LayerMachine.TestCase
