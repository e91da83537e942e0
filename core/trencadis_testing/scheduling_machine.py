"""Random histories of an engine under a scheduling policy, as a hypothesis state machine.

Requests arrive, steps run, requests are aborted, blocks are taken away and given back, time passes; after each of these every
invariant is checked against books that are kept here, from the definitions. Numbers in messages are those of the list of
scheduler invariants. Imported by the suite when it is run: hypothesis is needed here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from trencadis.clock import SimulatedClock
from trencadis.errors import PromptTooLongError, RequestRefusedError
from trencadis.interfaces import PendingStep, SchedulingPolicy
from trencadis.records import Batch, FinishedSequence, FinishReason, Plan, Request, SamplingParams
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.invariants import broken_invariants, broken_plan_rules

__all__ = ["run_histories"]

_BLOCK_SIZE = 4
_SYSTEM = tuple(range(20, 28))

_SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([10, 7, 14, 20, 60]),
        "max_num_seqs": st.sampled_from([1, 3, 6]),
        "max_num_batched_tokens": st.sampled_from([3, 16, 40]),
        "async_scheduling": st.sampled_from([True, False]),
        "prefix_caching": st.sampled_from([True, True, False]),
        "max_preemptions": st.sampled_from([1, 16]),
        "max_wait_s": st.sampled_from([0.5, 60.0]),
    }
)
_PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([2, 9, 25]),
    ignore_eos=st.booleans(),
    temperature=st.just(0.0),
)


@attrs.define
class _Book:
    """What is known of a live request from outside the engine.

    Attributes:
        request: The request.
        next_start: Where its next chunk must start; None until it is admitted.
    """

    request: Request
    next_start: int | None = None


class _Watch(FakeExecutor):
    """Checks every batch when it is submitted."""

    def __init__(self, backend: FakeBackend, *, token_budget: int, max_num_seqs: int) -> None:
        super().__init__(backend)
        self.faults: list[str] = []
        self.state: Any = None
        self._sizes = {"token_budget": token_budget, "max_num_seqs": max_num_seqs}

    def submit(self, batch: Batch) -> PendingStep:
        self.faults += broken_plan_rules(batch, **self._sizes)
        for one in batch.passes:
            for row, start, length in zip(one.rows.tolist(), one.starts.tolist(), one.query_lens.tolist(), strict=True):
                blocks = self.state.rows.block_tables[row, start // _BLOCK_SIZE : -(-(start + length) // _BLOCK_SIZE)]
                if (self.state.blocks.ref_counts[blocks] != 1).any():
                    self.faults.append(f"11: row {row} writes tokens {start} to {start + length} into shared blocks")
        return super().submit(batch)


class PolicyMachine(RuleBasedStateMachine):
    """One history. A subclass sets ``make``."""

    make: Callable[[], SchedulingPolicy]
    may_refuse = False

    @initialize(sizes=_SIZES, layout=st.sampled_from(["ragged", "padded"]), drafts=st.booleans())
    def build(self, sizes: dict[str, Any], layout: str, drafts: bool) -> None:
        """Make an engine of any small size."""
        self.clock = SimulatedClock()
        self.drafts = drafts  # those that are rejected are computed in vain: the next chunk starts earlier
        self.policy = type(self).make()
        self.max_model_len = sizes["num_blocks"] * _BLOCK_SIZE
        backend = FakeBackend(layout=layout, max_model_len=self.max_model_len, max_prefill_batch_size=2)
        self.watch = _Watch(backend, token_budget=sizes["max_num_batched_tokens"], max_num_seqs=sizes["max_num_seqs"])
        speculator = ScriptedSpeculator(lambda tokens: [*fake_text(tokens.tolist(), 1), 3]) if drafts else None
        self.engine = make_engine(
            policy=self.policy, executor=self.watch, clock=self.clock, warmup=False, speculator=speculator, **sizes
        )
        self.watch.state = self.engine._state  # noqa: SLF001 - shadow accounting looks inside
        self.plans: list[Plan] = []
        self._record_plans()
        self.books: dict[str, _Book] = {}
        self.num_seen = self.num_added = self.num_ended = self.num_preempted = 0
        self.is_sound = True
        self.withheld: Any = np.empty(0, np.int32)
        self.engine._withheld_by_test = {}  # type: ignore[attr-defined] # noqa: SLF001

    def _record_plans(self) -> None:
        scheduler = self.engine._scheduler  # noqa: SLF001
        plan_of = scheduler.plan

        def plan(*args: Any, **kwargs: Any) -> Plan | None:
            made = plan_of(*args, **kwargs)
            if made is not None:
                self.plans.append(made)
            return made

        scheduler.plan = plan  # type: ignore[method-assign]

    # --------------------------------------------------------------------------------------------------- rules

    @rule(
        count=st.sampled_from([1, 3, 6]),
        num_steps=st.sampled_from([0, 1, 3]),
        kind=st.integers(0, 3),
        length=st.sampled_from([1, 4, 6, 8, 12, 23]),
        shares=st.booleans(),
        params=_PARAMS,
        priority=st.sampled_from([0, 0, 1, 7]),
        tenant=st.sampled_from(["", "blue", "green"]),
        weight=st.sampled_from([1.0, 1.0, 4.0]),
        target_s=st.sampled_from([0.01, 0.4, float("inf")]),
    )
    def arrive(
        self, count: int, num_steps: int, kind: int, length: int, shares: bool, target_s: float, **more: Any
    ) -> None:
        """Some requests come, perhaps with a prompt that was there before, and some steps run."""
        for number in range(count):
            own = tuple(((kind + number) % 4 * 13 + i * 7) % 97 for i in range(length))
            request = Request(
                request_id=f"request {self.num_seen}",
                prompt_token_ids=_SYSTEM + own if shares else own,
                cache_salt="",
                ttft_target_s=target_s,
                tpot_target_s=target_s,
                **more,
            )
            self.num_seen += 1
            self._add(request)
        for _ in range(num_steps):
            self._step()

    def _add(self, request: Request) -> None:
        """Add a request; one that can never fit is refused at once (18)."""
        too_long = len(request.prompt_token_ids) >= self.max_model_len
        try:
            self.engine.add(request)
        except PromptTooLongError:
            assert too_long, "18: a request that fits was refused"
            return
        except RequestRefusedError:
            assert self.may_refuse, "admit() refuses; declare may_refuse"
            return
        assert not too_long, "18: a request that can never fit was taken"
        self.num_added += 1
        self.books[request.request_id] = _Book(request)
        self._check()

    @rule(count=st.sampled_from([2, 5, 12]), seconds=st.sampled_from([0.0, 0.0, 0.3, 100.0]))
    def step(self, count: int, seconds: float) -> None:
        """Steps run; before them time may pass."""
        self.clock.advance(seconds)
        for _ in range(count):
            self._step()

    @precondition(lambda self: bool(self.books))
    @rule(what=st.sampled_from(["abort", "squeeze"]), choice=st.integers(0, 1000), share=st.sampled_from([0.3, 0.7]))
    def disturb(self, what: str, choice: int, share: float) -> None:
        """A client goes away, or blocks are taken from outside and later given back."""
        if what == "squeeze":
            self._squeeze(share)
        else:
            self._abort(sorted(self.books)[choice % len(self.books)])
        self._check()

    def _abort(self, name: str) -> None:
        end = self.engine.abort(name)
        assert end is not None
        assert end.finish_reason is FinishReason.ABORT
        assert self.engine.abort(name) is None, "32: aborted twice"
        self._leave(name)

    def _squeeze(self, share: float) -> None:
        blocks = self.engine._state.blocks  # noqa: SLF001
        if self.withheld.size:
            blocks.release(self.withheld, now_s=self.clock.now_s())
            self.withheld = self.withheld[:0]
        else:
            self.withheld = blocks.allocate(int(blocks.num_available * share))
        self.engine._withheld_by_test = dict.fromkeys(self.withheld.tolist(), 1)  # type: ignore[attr-defined] # noqa: SLF001

    def teardown(self) -> None:
        """Everything that came ends (1, 20, 22), and no block is lost (12)."""
        if not getattr(self, "is_sound", False):
            return  # a check has failed already
        if self.withheld.size:
            self._squeeze(0.0)
        for _ in range(60 * (len(self.books) + 1) + 200):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.books, f"20: {sorted(self.books)} are not done"
        assert self.num_added == self.num_ended, "1: a request is lost"
        assert self.engine._state.blocks.num_used == 0, "12: a block did not come back"  # noqa: SLF001
        assert self.num_preempted <= 20 * (self.num_added + 1), f"22: {self.num_preempted} preemptions"

    # -------------------------------------------------------------------------------------------------- checks

    def _step(self) -> None:
        self.is_sound = False
        names = {slot: name for name, slot in self.engine._state.slot_of.items()}  # noqa: SLF001
        deltas = self.engine.step()
        self.clock.advance(0.05)
        for plan in self.plans:
            self._check_plan(plan, names)
        self.plans.clear()
        assert {names[slot] for slot in deltas.slots.tolist()} <= set(self.books), "32: output after the end"
        for end in deltas.finished:
            self._check_end(end)
            self._leave(end.request_id)
        self._check()
        self.is_sound = True

    def _check(self) -> None:
        assert broken_invariants(self.engine) == []
        assert self.watch.faults == []
        assert set(self.engine._state.slot_of) == set(self.books), "1, 3: who lives is not who came and did not end"  # noqa: SLF001

    def _check_plan(self, plan: Plan, names: dict[int, str]) -> None:
        scheduled, preempted = set(plan.slots.tolist()), set(plan.preempted.tolist())
        self.num_preempted += len(preempted)
        assert not scheduled & preempted, "13: preempted and scheduled in one step"
        assert not (preempted and plan.admitted.size) or self.policy.preempts, "16: admitted in a step that preempted"
        for slot in preempted:
            self.books[names[slot]].next_start = None
        for slot, start, length in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.num_scheduled.tolist(), strict=True
        ):
            book = self.books[names[slot]]
            if slot in plan.admitted:
                assert book.next_start is None, "3: it is admitted and runs already"
                assert start % _BLOCK_SIZE == 0, "30: part of a block was taken from the cache"
            else:
                assert book.next_start is not None, "3: it runs and was never admitted"
                assert start <= book.next_start, "7: a chunk skips tokens"
                assert self.drafts or start == book.next_start, "7: a chunk overlaps the one before"
            book.next_start = start + length

    def _check_end(self, end: FinishedSequence) -> None:
        request = self.books[end.request_id].request
        if end.finish_reason is FinishReason.ERROR:
            # Alone and still without room: that is for the blocks that were taken away here.
            assert self.withheld.size, end.error
            assert "has no room for this sequence alone" in end.error, end.error
            return
        params = request.params
        room = self.max_model_len - len(request.prompt_token_ids)
        eos = -1 if params.ignore_eos else 0
        true = fake_text(request.prompt_token_ids, min(params.max_tokens or 0, room), eos=eos)
        assert end.token_ids.tolist() == true, f"27: the text of {end.request_id}"
        assert end.first_scheduled_s is not None
        assert end.first_token_s is not None
        times = (end.arrival_s, end.first_scheduled_s, end.first_token_s, end.finish_s)
        assert list(times) == sorted(times), f"33: {times}"

    def _leave(self, name: str) -> None:
        del self.books[name]
        self.num_ended += 1


def run_histories(
    make: Callable[[], SchedulingPolicy], *, may_refuse: bool, num_histories: int, num_rules: int
) -> None:
    """Run random histories, the same ones every time.

    Args:
        make: Makes a policy for each.
        may_refuse: Whether ``admit`` may refuse.
        num_histories: How many.
        num_rules: Most events of each.

    Raises:
        AssertionError: An invariant is broken; hypothesis prints the history.
    """
    body = {"make": staticmethod(make), "may_refuse": may_refuse, "__doc__": PolicyMachine.__doc__}
    run_state_machine_as_test(
        type("PolicyHistory", (PolicyMachine,), body),
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=num_rules,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
