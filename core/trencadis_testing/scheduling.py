"""Conformance of scheduling policies: subclass, say how to make yours, run pytest.

    class TestMine(SchedulingConformance):
        def make(self):
            return MyPolicy()

Every test runs the policy in a whole engine on a fake backend whose text proves the KV cache, without a fallback: what breaks the
contract fails the test.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.clock import SimulatedClock
from trencadis.errors import RequestRefusedError
from trencadis.interfaces import PendingStep, SchedulingPolicy
from trencadis.records import Batch, FinishedSequence, FinishReason, Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.invariants import broken_invariants, broken_plan_rules

if TYPE_CHECKING:
    from trencadis.engine.engine import Engine

__all__ = ["SchedulingConformance"]

_TENANTS = ("", "blue", "green")


@attrs.frozen
class _Arrival:
    """A request and the step before which it arrives."""

    step: int
    request: Request


class _Recorder(FakeExecutor):
    """Keeps what every batch schedules, and what is wrong with it."""

    def __init__(self, backend: FakeBackend, *, token_budget: int, max_num_seqs: int) -> None:
        super().__init__(backend)
        self.plans: list[list[tuple[int, int, int]]] = []
        self.faults: list[str] = []
        self._sizes = {"token_budget": token_budget, "max_num_seqs": max_num_seqs}

    def submit(self, batch: Batch) -> PendingStep:
        self.faults += broken_plan_rules(batch, **self._sizes)
        self.plans.append(
            [
                entry
                for one in batch.passes
                for entry in zip(one.rows.tolist(), one.starts.tolist(), one.query_lens.tolist(), strict=True)
            ]
        )
        return super().submit(batch)


def _arrivals(seed: int, *, num_requests: int = 24, longest: int = 30) -> list[_Arrival]:
    """Return a bursty workload: shared prefixes, priorities, tenants, one-token and long requests. Pure."""
    rng = random.Random(seed)
    system = [rng.randrange(97) for _ in range(12)]
    arrivals, step = [], 0
    for i in range(num_requests):
        step += rng.choice([0, 0, 0, 1, 5])
        own = [rng.randrange(97) for _ in range(rng.randint(1, longest))]
        prompt = system + own if rng.random() < 0.5 else own
        request = Request(
            request_id=f"request {i}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=rng.choice([1, 2, 8, 20])),
            priority=rng.choice([0, 0, 1, 5]),
            tenant=rng.choice(_TENANTS),
            cache_salt="",
        )
        arrivals.append(_Arrival(step, request))
    return arrivals


class SchedulingConformance:
    """What every scheduling policy must keep. Override :meth:`make`; set ``may_refuse`` if ``admit`` refuses."""

    may_refuse = False
    max_steps = 4000

    def make(self) -> SchedulingPolicy:
        """Return a fresh policy."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourPolicy, or a method make(self)")

    # --------------------------------------------------------------------------------------------------- tests

    def test_every_text_is_what_first_come_first_served_would_give(self) -> None:
        """27: output does not depend on the policy."""
        for seed in range(4):
            ends = self._run(seed)[0]
            for arrival in _arrivals(seed):
                request = arrival.request
                if request.request_id in ends:
                    true = fake_text(list(request.prompt_token_ids), request.params.max_tokens or 0)
                    assert ends[request.request_id].token_ids.tolist() == true, request.request_id

    def test_nobody_is_lost_and_all_work_ends(self) -> None:
        """1, 20: every accepted request ends, with a reason that is no error."""
        for seed in range(4):
            ends, accepted, _ = self._run(seed)
            assert set(ends) == accepted
            faulty = {end.error for end in ends.values() if end.finish_reason is FinishReason.ERROR}
            assert not faulty

    def test_it_refuses_nobody_unless_it_says_so(self) -> None:
        """Admission control is a declared feature."""
        if not self.may_refuse:
            assert len(self._run(0)[1]) == len(_arrivals(0))

    def test_budgets_rows_and_blocks_are_kept_under_pressure(self) -> None:
        """4, 5, 9, 10, 13: also when the KV cache holds a fraction of the work."""
        pressures: list[dict[str, Any]] = [
            {"num_blocks": 20},
            {"num_blocks": 26, "max_num_seqs": 2},
            {"token_budget": 3},
        ]
        for seed, sizes in enumerate(pressures):
            self._run(seed, **sizes)

    def test_same_work_gives_the_same_plans(self) -> None:
        """26: no wall clock, no global random source, no order of sets."""
        assert self._run(7)[2].plans == self._run(7)[2].plans

    def test_it_works_without_overlap_and_with_padding(self) -> None:
        """The policy must not depend on the pipeline or the layout."""
        self._run(1, async_scheduling=False)
        self._run(2, layout="padded")

    def test_preempted_sequences_come_back(self) -> None:
        """14, 22: long outputs in a tiny cache preempt and still end."""
        arrivals = [
            _Arrival(0, attrs.evolve(a.request, params=SamplingParams(max_tokens=30, ignore_eos=True)))
            for a in _arrivals(3, num_requests=6, longest=8)
        ]
        ends, accepted, _ = self._run(3, arrivals=arrivals, num_blocks=18, eos=-1)
        assert set(ends) == accepted
        assert any(end.num_preemptions for end in ends.values())
        assert all(len(end.token_ids) == 30 for end in ends.values())

    def test_aborts_in_every_state_leave_nothing_behind(self) -> None:
        """12, 32: a policy that keeps books per slot must survive that slots are reused."""
        self._run(5, abort_every=3)

    # ------------------------------------------------------------------------------------------------- machinery

    def _run(
        self,
        seed: int,
        *,
        arrivals: list[_Arrival] | None = None,
        num_blocks: int = 60,
        max_num_seqs: int = 4,
        token_budget: int = 24,
        layout: str = "ragged",
        eos: int = 0,
        abort_every: int = 0,
        **options: Any,
    ) -> tuple[dict[str, FinishedSequence], set[str], _Recorder]:
        """Serve a workload and check every invariant after every step; returns ends, accepted ids and the record."""
        backend = FakeBackend(layout=layout, max_model_len=num_blocks * 4, eos=eos, max_prefill_batch_size=2)
        recorder = _Recorder(backend, token_budget=token_budget, max_num_seqs=max_num_seqs)
        clock = SimulatedClock()
        engine = make_engine(
            policy=self.make(),
            executor=recorder,
            clock=clock,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            warmup=False,
            **options,
        )
        todo = list(_arrivals(seed) if arrivals is None else arrivals)
        ends: dict[str, FinishedSequence] = {}
        accepted: set[str] = set()
        for step in range(self.max_steps):
            while todo and todo[0].step <= step:
                self._add(engine, todo.pop(0).request, accepted)
            if abort_every and step % abort_every == 0 and engine._state.slot_of:  # noqa: SLF001
                end = engine.abort(next(iter(engine._state.slot_of)))  # noqa: SLF001
                accepted.discard(end.request_id if end else "")
            ends.update((end.request_id, end) for end in engine.step().finished)
            clock.advance(0.05)
            assert broken_invariants(engine) == []
            assert recorder.faults == []
            if not todo and not engine.has_work:
                assert engine._state.blocks.num_used == 0, "12: every block comes back"  # noqa: SLF001
                return ends, accepted, recorder
        raise AssertionError(f"20: after {self.max_steps} steps {sorted(engine._state.slot_of)} are not done")  # noqa: SLF001

    def _add(self, engine: Engine, request: Request, accepted: set[str]) -> None:
        try:
            engine.add(request)
        except RequestRefusedError:
            return
        accepted.add(request.request_id)
