"""The scheduler's invariants as a state machine over arrivals, steps, aborts, shrinking KV, failures and loads."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.core.invariants import broken_invariants, broken_plan_rules
from trencadis.clock import SimulatedClock
from trencadis.interfaces import PendingStep
from trencadis.records import Batch, FinishReason, Request, SamplingParams
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator, ScriptedTrees
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text

BLOCK_SIZE = 4
SYSTEM_PROMPT = tuple(range(1, 18))


class Recorder(FakeExecutor):
    """Checks every batch on its way to the backend."""

    faults: list[str]
    token_budget: int
    max_num_seqs: int

    def submit(self, batch: Batch) -> PendingStep:
        self.faults += broken_plan_rules(batch, token_budget=self.token_budget, max_num_seqs=self.max_num_seqs)
        return super().submit(batch)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(2, 6),
        token_budget=st.integers(6, 64),
        overlap=st.booleans(),
        layout=st.sampled_from(["ragged", "padded", "merged", "unified"]),
        feature=st.sampled_from(["plain", "plain", "drafts", "trees", "connector", "slow connector", "no cache"]),
        swap_blocks=st.sampled_from([0, 64, 6]),
    )
    def build(
        self,
        num_blocks: int,
        max_num_seqs: int,
        token_budget: int,
        overlap: bool,
        layout: str,
        feature: str,
        swap_blocks: int,
    ) -> None:
        self.failing: set[int] = set()
        backend = FakeBackend(
            layout="padded" if layout == "merged" else layout,
            max_model_len=num_blocks * BLOCK_SIZE,
            max_prefill_batch_size=2,
            merges_prefills=layout == "merged",
            fails=self.maybe_fail,
        )
        self.executor = Recorder(backend)
        self.executor.faults = []
        self.executor.token_budget, self.executor.max_num_seqs = token_budget, max_num_seqs
        # Without a prefix cache every hit comes from the connector.
        options: dict[str, Any] = {"prefix_caching": feature not in {"no cache", "slow connector"}}
        if feature == "drafts":
            options["speculator"] = ScriptedSpeculator(self.draft)
        if feature == "trees" and layout == "ragged":
            options["speculator"] = ScriptedTrees(self.tree)
        if "connector" in feature:
            slow = feature == "slow connector"
            options["connector"] = LoopConnector(
                delay=3 if slow else 1,
                pending=1 if slow else 0,
                holds=slow,
                fail=lambda transfer_id: 4 if transfer_id % 3 == 1 else None,
            ).pair()
            options["load_timeout_s"] = 2.5
        self.clock = SimulatedClock()
        self.engine = make_engine(
            executor=self.executor,
            num_blocks=num_blocks,
            clock=self.clock,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            async_scheduling=overlap,
            warmup=False,
            preemption="swap" if swap_blocks else "recompute",
            swap_blocks=swap_blocks,
            **options,
        )
        self.ids = itertools.count()
        self.prompts: dict[str, tuple[tuple[int, ...], int]] = {}
        self.streamed: dict[str, list[int]] = {}
        self.owner: dict[int, str] = {}
        self.ended: dict[str, FinishReason] = {}
        self.withheld: list[int] = []
        self.poison: int | None = None

    def draft(self, tokens: Any) -> list[int]:
        """Draft the true continuation, but for every fifth length something false."""
        true = fake_text(tokens.tolist(), 3, eos=-1)
        return [true[0], 96 - true[1], true[2]] if len(tokens) % 5 == 0 else true

    def tree(self, tokens: Any) -> list[tuple[int, int]]:
        """Draft the same behind a false token of its own."""
        return [
            (96 - self.draft(tokens)[0], -1),
            *((token, i or -1) for i, token in enumerate(self.draft(tokens))),
        ]

    def maybe_fail(self, batch: Batch, one: Any) -> None:
        """Fail every step in which the poisoned row's sequence takes part."""
        if self.poison is None:
            return
        row = self.engine._state.table.row[self.poison]
        if int(row) in one.rows.tolist():
            raise RuntimeError("a poisoned sequence")

    @rule(
        shared=st.booleans(),
        lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
        first=st.integers(0, 96),
        max_tokens=st.integers(1, 24),
        tenant=st.sampled_from(["", "", "a"]),
    )
    def arrive(self, shared: bool, lengths: list[int], first: int, max_tokens: int, tenant: str) -> None:
        for length in lengths:
            self.arrive_one(shared, length, first + length, max_tokens, tenant)

    def arrive_one(self, shared: bool, length: int, first: int, max_tokens: int, tenant: str) -> None:
        prompt = (SYSTEM_PROMPT[:length] if shared else ()) + tuple((first * 31 + i * 17) % 97 for i in range(length))
        prompt = prompt[: self.engine.max_model_len - 1]
        request_id = str(next(self.ids))
        slot = self.engine.add(
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens),
                tenant=tenant,
            )
        )
        self.prompts[request_id] = (prompt, min(max_tokens, self.engine.max_model_len - len(prompt)))
        self.streamed[request_id] = []
        self.owner[slot] = request_id

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.clock.advance(0.25)
            self.take(self.engine.step())

    @precondition(lambda self: self.owner)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        live = sorted(self.engine.inspect().sequences)
        if not live:
            return
        request_id = live[pick % len(live)]
        finished = self.engine.abort(request_id)
        assert finished is not None
        self.ended[request_id] = finished.finish_reason
        assert self.engine.abort(request_id) is None, "32: a second abort is a no-op"

    @rule(num_blocks=st.integers(1, 6))
    def shrink(self, num_blocks: int) -> None:
        blocks = self.engine._state.blocks
        take = min(num_blocks, blocks.num_available, max(0, blocks.num_blocks // 3 - len(self.withheld)))
        self.withheld += blocks.allocate(take).tolist()

    @rule()
    def grow(self) -> None:
        self.give_back()

    @precondition(lambda self: self.owner and self.poison is None)
    @rule(pick=st.integers(0, 100))
    def poison_one(self, pick: int) -> None:
        live = sorted(self.engine.inspect().by_slot)
        if live:
            self.poison = live[pick % len(live)]

    def take(self, deltas: Any) -> None:
        starts = 0
        for slot, count in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            self.streamed[self.owner[slot]] += deltas.token_ids[starts : starts + count].tolist()
            starts += count
        for finished in deltas.finished:
            assert finished.request_id not in self.ended, "32: an end is announced once"
            self.ended[finished.request_id] = finished.finish_reason
            if finished.slot == self.poison:
                self.poison = None
            self.check_text(finished)

    def check_text(self, finished: Any) -> None:
        prompt, num_tokens = self.prompts[finished.request_id]
        true = fake_text(prompt, num_tokens)
        tokens = finished.token_ids.tolist()
        if finished.finish_reason is FinishReason.ERROR:
            assert "poisoned" in finished.error or "no room" in finished.error, finished.error
            assert tokens == true[: len(tokens)]
        else:
            assert tokens == true, "27: the text does not depend on who shared the engine"
            assert self.streamed[finished.request_id] == tokens
        times = (finished.arrival_s, finished.first_scheduled_s, finished.first_token_s, finished.finish_s)
        known = [time for time in times if time is not None]
        assert known == sorted(known), "33: time runs forward"

    def give_back(self) -> None:
        import numpy as np

        self.engine._state.blocks.release(np.array(self.withheld, np.int32), now_s=0.0)
        self.withheld = []

    @invariant()
    def all_invariants_hold(self) -> None:
        if hasattr(self, "engine"):
            assert broken_invariants(self.engine, withheld=self.withheld) == []
            assert self.executor.faults == []

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.give_back()
        for _ in range(6000):
            if not self.engine.has_work:
                break
            self.clock.advance(0.25)
            self.take(self.engine.step())
            assert broken_invariants(self.engine) == []
        assert not self.engine.has_work, "20: with finite work every request ends"
        assert set(self.ended) == set(self.prompts), "1: nobody is lost"
        assert self.engine.inspect().blocks.num_used == 0, "12: every block comes back"
        assert self.engine.inspect().num_free_rows == self.executor.max_num_seqs


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
