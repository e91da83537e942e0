"""Whatever becomes of layers of loads, in any order, beside everything else that an engine does with its sequences."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.core.invariants import broken_invariants
from support.kv.wild_connector import WildConnector
from trencadis.clock import SimulatedClock
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


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
            release_timeout_s=1e6,
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

    @rule(fate=st.sampled_from(["comes", "fails", "stalls", "raises"]), layer=st.integers(0, 2), by_layer=st.booleans())
    def choose_fate(self, fate: str, layer: int, by_layer: bool) -> None:
        self.wild.fate, self.wild.fate_layer, self.wild.by_layer = fate, layer, by_layer

    @rule(pick=st.integers(0, 9), num_valid=st.integers(-1, 4))
    def load_of_waiting_sequence_ends(self, pick: int, num_valid: int) -> None:
        waiting = sorted(
            transfer_id
            for transfer_id in self.wild.loads
            if transfer_id in self.engine.stage("transfer").transfers._loads
        )
        if waiting:
            transfer_id = waiting[pick % len(waiting)]
            if num_valid < 0:
                self.wild.arrive(transfer_id)
            else:
                self.wild.fail(transfer_id, min(num_valid, len(self.wild.loads[transfer_id][0])))

    @rule(pick=st.integers(0, 9), releases=st.booleans())
    def cancelled_load_moves(self, pick: int, releases: bool) -> None:
        waiting = sorted(self.wild.cancelled)
        if waiting:
            transfer_id = waiting[pick % len(waiting)]
            self.wild.scribble(transfer_id)
            if releases:
                self.wild.release(transfer_id)

    @rule(name=st.sampled_from(["lookup", "on_allocated", "on_layerwise", "on_computed", "on_failed", "on_cancelled"]))
    def call_raises(self, name: str) -> None:
        self.wild.raising = {name}
        self.step(1)
        self.wild.raising = set()

    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        live = sorted(self.engine.inspect().sequences)
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
        transfers = self.engine.stage("transfer").transfers
        ended = transfers.num_loaded + transfers.num_failed_loads + transfers.num_cancelled_loads
        assert transfers.num_loads == ended + transfers.num_waiting_for_kv + len(transfers.layered)
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
            for transfer_id in list(self.wild.loads):
                if transfer_id in self.engine.stage("transfer").transfers._loads:
                    self.wild.arrive(transfer_id)
            for transfer_id in list(self.wild.cancelled):
                self.wild.release(transfer_id)
            self.step(1)
        assert not self.engine.has_work
        assert self.engine.inspect().blocks.num_used == 0, "every block comes back"
        assert self.ended == set(self.prompts)


LayerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestLayerMachine = LayerMachine.TestCase
