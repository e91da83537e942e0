"""Conformance of scheduling policies: subclass, say how to make yours, run pytest.

    class TestMine(SchedulingConformance):
        def make(self):
            return MyPolicy()

Every test runs the policy in a whole engine on a fake backend whose text proves the KV cache, without a fallback: what breaks the
contract fails the test.

The engine keeps its own invariants under any policy, and proves them in its own tests. This suite checks what a policy can break.
Numbers in names and messages are those of this list. *H* is checked in random histories (``scheduling_machine``), *D* by a test of
its own, here or, where a policy must declare it, in ``scheduling_declared``.

==== ==== ===================================================================================================================
 1    HD  every accepted request ends
14    D   no sequence is preempted again and again where there is room for all
15    D   the declared victim is preempted
19    H   with work and room for it, no three steps idle
20    HD  all work ends within as many steps as its tokens explain
21    D   a request that waited ``max_wait_s`` is served next
22    HD  preemptions come to rest
23    D   the declared order of arrival is kept
24    D   the declared priorities are kept
25    D   the declared fairness is bounded
26    D   the same work gives the same plans
27    HD  no step fails, and no text depends on the policy
28    D   plans do not depend on what texts will be
==== ==== ===================================================================================================================
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, ClassVar

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import RequestRefusedError
from trencadis.interfaces import PendingStep
from trencadis.records import Batch, FinishedSequence, FinishReason, Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.hash_seeds import same_under_other_hashes
from trencadis_testing.resources import ends_its_threads, growth_bytes
from trencadis_testing.scheduling_declared import DeclaredBehaviour
from trencadis_testing.workloads import Arrival, arrivals, serve

__all__ = ["SchedulingConformance"]

_MAX_GROWTH_BYTES = 32.0
"""For each request that ended: a kept request id takes more than 50."""

_FEW_HISTORIES, _FEW_RULES = 8, 25
"""Histories that run by default, and the most events of each. They meet every feature of the engine, and more every pair of features."""

_FEW, _MANY, _COST_RATIO = 200, 3200, 64
"""Sixteen times as many waiting sequences may make a step so many times as long: O(n log n) is below 24, O(n²) is 256."""


class _Recorder(FakeExecutor):
    """Keeps what every batch schedules."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend)
        self.plans: list[list[tuple[int, int, int]]] = []

    def submit(self, batch: Batch) -> PendingStep:
        self.plans.append(
            [
                entry
                for one in batch.passes
                for entry in zip(one.rows.tolist(), one.starts.tolist(), one.query_lens.tolist(), strict=True)
            ]
        )
        return super().submit(batch)


class SchedulingConformance(DeclaredBehaviour):
    """What every scheduling policy must keep. Override :meth:`make`; set ``may_refuse`` if ``admit`` refuses.

    ``declares`` says what else the policy promises, and holds it to that: ``arrival_order``, ``priority_order``, ``fairness``;
    ``counts_tokens`` that it has constants in tokens, such as quanta or times per token.
    Random histories run too, the same ones every time; they need hypothesis, and are skipped without it. By default these are a few,
    which take seconds; with ``pytest --trencadis-all-histories`` they are ``num_histories`` of up to ``num_rules`` events.
    """

    declares: ClassVar[frozenset[str]] = frozenset()
    counts_tokens = False
    may_refuse = False
    max_steps = 4000
    num_histories = 60
    num_rules = 40

    # --------------------------------------------------------------------------------------------------- tests

    def test_every_text_is_what_first_come_first_served_would_give(self) -> None:
        """27: output does not depend on the policy."""
        for seed in range(4):
            ends = self._run(seed)[0]
            for arrival in arrivals(seed):
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
            assert len(self._run(0)[1]) == len(arrivals(0))

    def test_all_work_ends_under_pressure(self) -> None:
        """1, 20: also when the KV cache, the rows or the token budget hold a fraction of the work."""
        pressures: list[dict[str, Any]] = [
            {"num_blocks": 20},
            {"num_blocks": 26, "max_num_seqs": 2},
            {"token_budget": 3},
        ]
        for seed, sizes in enumerate(pressures):
            ends, accepted, _ = self._run(seed, **sizes)
            assert set(ends) == accepted

    def test_same_work_gives_the_same_plans(self) -> None:
        """26: no wall clock, no global random source."""
        assert self._run(7)[2].plans == self._run(7)[2].plans

    def test_same_work_gives_the_same_plans_in_a_process_that_hashes_differently(self) -> None:
        """26: no order of a set of tenants or request ids; ranks and replays are other processes."""
        same_under_other_hashes(self, "_plans")

    def _plans(self) -> list[list[tuple[int, int, int]]]:
        return [plan for seed in range(4) for plan in self._run(seed)[2].plans]

    def test_it_works_without_overlap_and_with_padding(self) -> None:
        """The policy must not depend on the pipeline or the layout."""
        self._run(1, async_scheduling=False)
        self._run(2, layout="padded")

    def test_preempted_sequences_come_back(self) -> None:
        """14, 22: long outputs in a tiny cache preempt and still end."""
        todo = [
            Arrival(0, attrs.evolve(a.request, params=SamplingParams(max_tokens=30, ignore_eos=True)))
            for a in arrivals(3, num_requests=6, longest=8)
        ]
        ends, accepted, _ = self._run(3, todo=todo, num_blocks=18, eos=-1)
        assert set(ends) == accepted
        assert any(end.num_preemptions for end in ends.values())
        assert all(len(end.token_ids) == 30 for end in ends.values())

    def test_aborts_in_every_state_leave_nothing_behind(self) -> None:
        """A policy that keeps books per slot must survive that slots are reused."""
        self._run(5, abort_every=3)

    def test_plans_do_not_depend_on_what_texts_will_be(self) -> None:
        """28: with other outputs, and another end of them, all is the same until the first sequence ends."""
        plans, ends = [], []
        for vocab_size, eos in ((97, 0), (89, 88), (97, -1)):
            recorder, first_end = self._until_first_end(vocab_size=vocab_size, eos=eos)
            plans.append(recorder.plans)
            ends.append(first_end)
        assert [plan[: min(ends)] for plan in plans] == [plans[0][: min(ends)]] * 3

    def test_nobody_starves_behind_newcomers(self) -> None:
        """21: who waited ``max_wait_s`` is served next, however many others keep coming, and whatever they are."""
        clock = SimulatedClock()
        engine = make_engine(
            policy=self.make(), clock=clock, num_blocks=60, max_num_seqs=2, max_num_batched_tokens=24, max_wait_s=1.0
        )
        short = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add(self._request("first", (1,), short))
        try:
            engine.add(self._request("long", tuple(range(40)), SamplingParams(max_tokens=30), priority=9, tenant="b"))
        except RequestRefusedError:
            assert self.may_refuse
            return
        for number in range(200):
            with contextlib.suppress(RequestRefusedError):
                engine.add(self._request(f"newcomer {number}", (number % 90, 1), short))
            ended = {end.request_id: end for end in engine.step().finished}
            clock.advance(0.05)
            if "long" in ended:
                scheduled_s = ended["long"].first_scheduled_s
                assert scheduled_s is not None
                assert scheduled_s - ended["long"].arrival_s <= 2.0
                return
        raise AssertionError("21: a sequence starves")

    def test_giving_way_comes_to_rest(self) -> None:
        """14, 22: with room for all blocks, those that are there do not push each other out again and again."""
        engine = make_engine(policy=self.make(), num_blocks=200, max_num_seqs=2, max_num_batched_tokens=24)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        for number in range(8):
            with contextlib.suppress(RequestRefusedError):
                engine.add(self._request(str(number), (number,) * 9, params, priority=number % 3))
        drain(engine, self.max_steps)
        assert engine.totals.num_preempted <= 4 * 8, f"22: {engine.totals.num_preempted} preemptions of 8 sequences"

    def test_a_step_costs_no_more_than_sorting_those_that_wait(self) -> None:
        """Every step waits for it: O(n log n) in the waiting sequences at most."""
        few_s, many_s = self._step_s(_FEW), self._step_s(_MANY)
        assert many_s < _COST_RATIO * few_s, (
            f"a step takes {few_s * 1e6:.0f} µs with {_FEW} waiting sequences, {many_s * 1e6:.0f} µs with {_MANY}"
        )

    def test_nothing_is_kept_of_requests_that_ended(self) -> None:
        """An engine runs for months, and request ids never end: what grows has a bound."""
        policy = self.make()
        one = SamplingParams(max_tokens=1)

        def live(number: int) -> None:
            request = self._request(f"request {number}", (1, 2, 3), one, tenant=f"tenant {number % 3}")
            policy.on_added(slot=number % 8, request=request)
            policy.on_finished(slot=number % 8, tenant=number % 3, num_output_tokens=1)

        growth = growth_bytes(live)
        assert growth < _MAX_GROWTH_BYTES, f"it grows by {growth:.0f} bytes with each request that ended"

    def test_no_thread_is_left(self) -> None:
        """A policy has no ``close``: it starts none."""
        with ends_its_threads("the policy"):
            self._run(0)

    def _step_s(self, num_waiting: int) -> float:
        """Return the least processor time of some steps while so many sequences wait."""
        engine = make_engine(
            policy=self.make(), clock=SimulatedClock(), num_blocks=64, max_num_seqs=2, max_num_batched_tokens=24
        )
        params = SamplingParams(max_tokens=1)  # so that each step admits others, and asks for an order
        for number in range(num_waiting):
            with contextlib.suppress(RequestRefusedError):
                fields = {"priority": number % 5, "tenant": f"tenant {number % 7}"}
                engine.add(self._request(str(number), (number % 90, 1), params, **fields))
        taken = []
        for _ in range(4):
            start_s = time.thread_time()
            engine.step()
            taken.append(time.thread_time() - start_s)
        engine.close()
        return min(taken)

    def test_any_history_keeps_the_invariants(self) -> None:
        """All that are marked H: arrivals, aborts, transfers, drafts, pauses and time, in any order."""
        self._run_histories(min(self.num_histories, _FEW_HISTORIES), min(self.num_rules, _FEW_RULES))

    def test_any_of_many_long_histories_keeps_the_invariants(self, request: pytest.FixtureRequest) -> None:
        """All that are marked H, with every pair of the engine's features: what only rare histories show."""
        if self.num_histories <= _FEW_HISTORIES:
            pytest.skip(f"the suite sets num_histories = {self.num_histories}, and the few that always run are as many")
        if not request.config.getoption("trencadis_all_histories", default=False):
            pytest.skip(
                f"{self.num_histories} histories take half a second or more each: run them with --trencadis-all-histories"
            )
        self._run_histories(self.num_histories, self.num_rules)

    # ------------------------------------------------------------------------------------------------- machinery

    def _run_histories(self, num_histories: int, num_rules: int) -> None:
        pytest.importorskip("hypothesis", reason='random histories need hypothesis: pip install "trencadis[test]"')
        from trencadis_testing.scheduling_machine import run_histories

        run_histories(self.make, may_refuse=self.may_refuse, num_histories=num_histories, num_rules=num_rules)

    @staticmethod
    def _request(name: str, prompt: tuple[int, ...], params: SamplingParams, **fields: Any) -> Request:
        return Request(request_id=name, prompt_token_ids=prompt, params=params, **fields)

    def _until_first_end(self, *, vocab_size: int, eos: int) -> tuple[_Recorder, int]:
        """Serve requests that are there from the start; returns the record, and how many batches were planned before one ended."""
        backend = FakeBackend(vocab_size=vocab_size, eos=eos, max_model_len=240)
        recorder = _Recorder(backend)
        engine = make_engine(
            policy=self.make(), executor=recorder, num_blocks=60, max_num_seqs=3, max_num_batched_tokens=24
        )
        for number in range(12):
            prompt = tuple((number * 7 + i) % 80 for i in range(4 + 11 * number % 17))
            with contextlib.suppress(RequestRefusedError):
                engine.add(self._request(str(number), prompt, SamplingParams(max_tokens=30)))
        for _ in range(self.max_steps):
            if engine.step().finished:
                # A step that was planned before this commit knows of no end.
                return recorder, len(recorder.plans)
        raise AssertionError(f"20: after {self.max_steps} steps nobody is done")

    def _run(
        self,
        seed: int,
        *,
        todo: list[Arrival] | None = None,
        num_blocks: int = 60,
        max_num_seqs: int = 4,
        token_budget: int = 24,
        layout: str = "ragged",
        eos: int = 0,
        abort_every: int = 0,
        **options: Any,
    ) -> tuple[dict[str, FinishedSequence], set[str], _Recorder]:
        """Serve a workload; returns ends, accepted ids and the record."""
        backend = FakeBackend(layout=layout, max_model_len=num_blocks * 4, eos=eos, max_prefill_batch_size=2)
        recorder = _Recorder(backend)
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
        served = serve(
            engine,
            clock,
            arrivals(seed) if todo is None else todo,
            abort_every=abort_every,
            max_steps=self.max_steps,
        )
        return served.ends, served.accepted, recorder
