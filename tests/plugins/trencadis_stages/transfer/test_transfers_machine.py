"""Loads of a connector in any order of events."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.core.invariants import broken_invariants
from support.kv.transfer_engines import counts, request
from support.kv.wild_connector import WildConnector
from trencadis.clock import SimulatedClock
from trencadis.records import FinishedSequence
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


class TransferMachine(RuleBasedStateMachine):
    """Loads, failures, cancellations and late releases in any order: no block is lost, none is wrong, every load ends once."""

    @initialize(
        prefix_caching=st.booleans(),
        answer=st.sampled_from(["compute", "retry", "nonsense"]),
        timeout_s=st.sampled_from([1.0, 50.0]),
        num_blocks=st.integers(20, 40),
        holds=st.booleans(),
    )
    def build(self, prefix_caching: bool, answer: str, timeout_s: float, num_blocks: int, holds: bool) -> None:
        self.wild = WildConnector(answer=answer, timeout_s=timeout_s)
        self.wild.holds = holds
        self.clock = SimulatedClock()
        self.backend = FakeBackend(eos=-1, max_model_len=40)
        self.engine = make_engine(
            connector=self.wild.pair(),
            backend=self.backend,
            clock=self.clock,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
            release_timeout_s=20.0,
            max_waiting_loads=3,
            max_num_seqs=4,
        )
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.ends: dict[str, FinishedSequence] = {}

    @rule(length=st.integers(4, 24), family=st.integers(0, 1))
    def arrive(self, length: int, family: int) -> None:
        name = str(len(self.prompts))
        self.prompts[name] = tuple((5 * i + family) % 97 for i in range(1, length + 1))
        self.engine.add(request(name, self.prompts[name], max_tokens=6))

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.clock.advance(0.05)
            self.ends |= {end.request_id: end for end in self.engine.step().finished}

    @rule(pick=st.integers(0, 9), num_valid=st.integers(-1, 4))
    def load_ends(self, pick: int, num_valid: int) -> None:
        if self.wild.loads and not self.wild.is_closed[1]:
            transfer_id = sorted(self.wild.loads)[pick % len(self.wild.loads)]
            if num_valid < 0:
                self.wild.arrive(transfer_id)
            else:
                self.wild.fail(transfer_id, min(num_valid, len(self.wild.loads[transfer_id][0])))

    @rule(pick=st.integers(0, 9), scribbles=st.booleans(), releases=st.booleans())
    def cancelled_load_moves(self, pick: int, scribbles: bool, releases: bool) -> None:
        waiting = sorted({*self.wild.cancelled, *self.wild.held})
        if waiting and not self.wild.is_closed[1]:
            transfer_id = waiting[pick % len(waiting)]
            if scribbles and transfer_id in self.wild.cancelled:
                self.wild.scribble(transfer_id)
            if releases:
                self.wild.release(transfer_id)

    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        live = sorted(self.engine.inspect().sequences)
        if live:
            name = live[pick % len(live)]
            self.engine.abort(name)
            del self.prompts[name]
            self.prompts[f"aborted {len(self.prompts)} {name}"] = ()

    @rule(transfer_id=st.integers(0, 30))
    def report_is_repeated(self, transfer_id: int) -> None:
        if transfer_id not in self.wild.loads:
            self.wild.repeat(transfer_id)

    @rule(name=st.sampled_from(["lookup", "on_allocated", "on_computed", "on_finished", "on_failed", "on_cancelled"]))
    def call_raises(self, name: str) -> None:
        self.wild.raising = {name}
        self.step(1)
        self.wild.raising = set()

    @rule(seconds=st.sampled_from([0.5, 2.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def nothing_is_lost_and_nothing_ends_twice(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert broken_invariants(self.engine) == []
        assert self.wild.unanswered_hits == set(), "the engine says of every hit what becomes of it"
        num_loads, *ended = counts(self.engine)
        assert num_loads == sum(ended) + len(self.engine.inspect().stages["transfer"].waiting)
        for block_hash, block in self.engine._state.blocks._block_of.items():
            for array, content in zip(self.wild.content(block), self.wild.store.get(block_hash, ()), strict=False):
                assert (array == content).all(), "a block that was never verified can be found"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(400):
            if not self.engine.has_work:
                break
            for transfer_id in list(self.wild.loads):
                self.wild.arrive(transfer_id)
            for transfer_id in [*self.wild.cancelled, *self.wild.held]:
                self.wild.release(transfer_id)
            self.step(1)
        assert not self.engine.has_work
        assert self.engine.inspect().blocks.num_used == 0, "every block comes back"
        for name, prompt in self.prompts.items():
            if prompt:
                assert self.ends[name].token_ids.tolist() == fake_text(prompt, 6, eos=-1)


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
