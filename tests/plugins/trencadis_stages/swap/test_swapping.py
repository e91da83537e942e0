from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from support.core.invariants import broken_invariants
from trencadis.engine.sequences import Sequence
from trencadis.errors import ConfigValueError, RanksLostError, StepFailedError
from trencadis.interfaces import BlockCopies, Observer, SchedulerView, SchedulingPolicy
from trencadis.records import Batch, FinishReason, Request, SamplingParams, StepStats
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text


def request(name: str, length: int = 8, *, max_tokens: int = 30, salt: str = "") -> Request:
    first = sum(map(ord, name)) % 50
    return Request(
        request_id=name,
        prompt_token_ids=tuple((first + i) % 97 for i in range(length)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        cache_salt=salt,
    )


def text_of(asked: Request) -> list[int]:
    return fake_text(list(asked.prompt_token_ids), asked.params.max_tokens or 0, eos=-1)


def swapping_engine(**more: Any):
    backend = more.pop("backend", None) or FakeBackend(eos=-1, max_model_len=80)
    return make_engine(backend=backend, preemption="swap", **{"num_blocks": 20, "max_num_seqs": 4, **more})


def under_pressure(**more: Any):
    """Four sequences that grow to 10 blocks each, on 20 blocks."""
    engine = swapping_engine(**more)
    for name in "abcd":
        engine.add(request(name))
    return engine


def step_until(engine: Any, is_so: Callable[[], bool], max_steps: int = 200) -> None:
    for _ in range(max_steps):
        if is_so():
            return
        engine.step()
    raise AssertionError("it never came to that")


def swapped_hit(engine: Any, name: str) -> int:
    """How many blocks of a waiting sequence the prefix cache still holds."""
    return len(engine._state.local_hit(engine._state.table.sequence(engine.inspect().sequences[name].slot)))


def swapped(engine: Any) -> list[Sequence]:
    live = [engine._state.table.sequence(slot) for slot in engine.inspect().by_slot]
    return [sequence for sequence in live if sequence.slot in engine.inspect().stages["swap"].held]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_nothing_is_computed_twice_and_texts_are_those_of_an_engine_that_recomputes(overlap, prefix_caching):
    options = {"async_scheduling": overlap, "prefix_caching": prefix_caching}
    engine = under_pressure(**options)
    ends = drain(engine)
    assert {name: end.token_ids.tolist() for name, end in ends.items()} == {n: text_of(request(n)) for n in "abcd"}
    assert engine.totals.num_preempted > 0
    assert engine.totals.num_recomputed_tokens == 0
    assert engine.totals.num_swap_fallbacks == 0
    assert engine.totals.num_blocks_swapped_in > 0
    assert engine.stage("swap").num_free == engine.stage("swap").num_host_blocks
    taxed = make_engine(
        backend=FakeBackend(eos=-1, max_model_len=80),
        num_blocks=20,
        max_num_seqs=4,
        **{**options, "prefix_caching": False},
    )
    for name in "abcd":
        taxed.add(request(name))
    drain(taxed)
    assert taxed.totals.num_recomputed_tokens > 0


def test_the_token_in_flight_comes_after_the_preemption_and_its_kv_is_in_the_copies():
    """Two steps overlap: who is swapped out has a token that nobody knows yet, and goes on behind it."""
    with_a_token_in_flight: list[str] = []

    class Looks(FakeExecutor):
        def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
            super().swap_blocks(outs=outs, ins=ins)
            for one in swapped(engine):
                if one.late_token_epoch >= 0:
                    # All known tokens are swapped, for the step in flight computes the last of them.
                    assert engine._state.table.num_swapped_tokens[one.slot] == len(one.tokens)
                    with_a_token_in_flight.append(one.request.request_id)

    engine = under_pressure(async_scheduling=True, executor=Looks())
    ends = drain(engine)
    assert with_a_token_in_flight
    for name in with_a_token_in_flight:
        assert ends[name].token_ids.tolist() == text_of(request(name))
    assert engine.totals.num_recomputed_tokens == 0


def test_without_room_on_the_host_a_sequence_is_recomputed_and_counted():
    engine = under_pressure(swap_blocks=3, prefix_caching=False)
    ends = drain(engine)
    assert engine.totals.num_swap_fallbacks == engine.totals.num_preempted > 0
    assert engine.totals.num_recomputed_tokens > 0
    assert all(ends[name].token_ids.tolist() == text_of(request(name)) for name in "abcd")


def test_blocks_that_the_prefix_cache_still_holds_are_not_copied_back():
    """The first of two alike keeps their common prompt in use, so of the second only its own blocks come back."""
    engine = swapping_engine(num_blocks=12, max_num_seqs=2)
    alike = [request("x", 16, max_tokens=20), attrs.evolve(request("x", 16, max_tokens=20), request_id="y")]
    for one in alike:
        engine.add(one)
        engine.step()
    step_until(engine, lambda: bool(swapped(engine)))
    out = engine.stage("swap")
    (held,) = engine.inspect().stages["swap"].held.values()
    num_out = len(held)
    ends = drain(engine)
    assert engine.totals.num_blocks_swapped_in <= num_out - 4
    assert engine.totals.num_recomputed_tokens == 0
    assert out.num_free == out.num_host_blocks
    assert ends["x"].token_ids.tolist() == ends["y"].token_ids.tolist() == text_of(alike[0])


def test_prompt_is_swapped_in_the_middle_and_goes_on_there():
    """A long prompt loses its blocks half-computed, to decodes that grow."""

    class LongestPays(SchedulingPolicy):
        def victim(self, view: SchedulerView, *, candidates: np.ndarray) -> int:
            return int(candidates[np.argmax(view.num_prompt_tokens[candidates])])

    engine = swapping_engine(policy=LongestPays(), num_blocks=20, max_num_batched_tokens=4)
    short = [request("s", 4, max_tokens=40), request("t", 4, max_tokens=40)]
    long = request("l", 60, max_tokens=4)
    for one in (*short, long):
        engine.add(one)
    step_until(engine, lambda: bool(swapped(engine)))
    slot = engine.inspect().sequences["l"].slot
    assert 0 < engine._state.table.num_swapped_tokens[slot] < 60
    ends = drain(engine)
    assert engine.totals.num_recomputed_tokens == 0
    assert all(ends[one.request_id].token_ids.tolist() == text_of(one) for one in (*short, long))


@pytest.mark.parametrize("how", ["abort", "stop"])
def test_sequence_that_ends_while_it_is_swapped_gives_its_host_blocks_back(how):
    engine = under_pressure()
    step_until(engine, lambda: bool(swapped(engine)))
    state = engine.stage("swap")
    held = sum(map(len, engine.inspect().stages["swap"].held.values()))
    assert state.num_free == state.num_host_blocks - held
    name = swapped(engine)[0].request.request_id
    end = getattr(engine, how)(name)
    assert end.finish_reason is (FinishReason.ABORT if how == "abort" else FinishReason.STOP)
    assert broken_invariants(engine) == []
    rest = drain(engine)
    assert all(rest[other].token_ids.tolist() == text_of(request(other)) for other in set("abcd") - {name})
    assert (state.num_free, state.num_swapped) == (state.num_host_blocks, 0)


def test_swap_that_raises_costs_a_recomputation_and_no_text():
    faults = iter([RuntimeError("no DMA today")])

    def fails() -> None:
        fault = next(faults, None)
        if fault is not None:
            raise fault

    backend = FakeBackend(eos=-1, max_model_len=80, fails_to_swap=fails)
    engine = under_pressure(backend=backend, prefix_caching=False)
    ends = drain(engine)
    assert engine.totals.num_failed_steps == 1
    assert engine.totals.num_recomputed_tokens > 0
    assert all(ends[name].token_ids.tolist() == text_of(request(name)) for name in "abcd")


def test_swap_that_fails_with_the_next_batch_costs_a_recomputation_and_no_text():
    """The copies were never made, and the sequence that left is not in the batch that tells so."""

    class Failed:
        def wait(self):
            raise StepFailedError("the copies failed")

    class TellsLate(FakeExecutor):
        num_failed = 0
        is_failing = False

        def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
            if len(outs) and self.num_failed < 2:
                self.num_failed += 1
                self.is_failing = True
                return
            super().swap_blocks(outs=outs, ins=ins)

        def submit(self, batch: Batch) -> Any:
            if self.is_failing:
                self.is_failing = False
                return Failed()
            return super().submit(batch)

    for overlap in (False, True):
        executor = TellsLate()
        engine = under_pressure(executor=executor, prefix_caching=False, async_scheduling=overlap)
        ends = drain(engine)
        assert executor.num_failed == engine.totals.num_failed_steps == 2
        assert all(ends[name].token_ids.tolist() == text_of(request(name)) for name in "abcd")


class LosesHostMemory(FakeExecutor):
    """Its ranks end once it is told so; others begin with empty memory."""

    is_lost = False

    def allocate(self, plan: Any) -> None:
        self.plan = plan
        super().allocate(plan)

    def submit(self, batch: Batch) -> Any:
        if self.is_lost:
            raise RanksLostError("rank 0 is gone")
        return super().submit(batch)

    def restart(self) -> None:
        self.is_lost = False
        self.allocate(self.plan)


def test_nobody_comes_back_from_the_host_memory_of_ranks_that_were_lost():
    executor = LosesHostMemory()
    engine = under_pressure(executor=executor, prefix_caching=False, async_scheduling=False)
    step_until(engine, lambda: bool(swapped(engine)))
    engine.step()
    assert swapped(engine)
    executor.is_lost = True
    engine.step()
    assert not swapped(engine)
    ends = drain(engine)
    assert all(ends[name].token_ids.tolist() == text_of(request(name)) for name in "abcd")


def test_blocks_that_came_back_are_findable_again():
    """While ``d`` was swapped its blocks were given to others; a later request with its prompt finds the copies."""
    engine = under_pressure()
    step_until(engine, lambda: bool(swapped(engine)))
    name = swapped(engine)[0].request.request_id
    slot = engine.inspect().sequences[name].slot
    step_until(engine, lambda: engine._state.table.row[slot] < 0 and not swapped_hit(engine, name))
    step_until(engine, lambda: name not in engine.inspect().sequences or engine._state.table.row[slot] >= 0)
    for other in set("abcd") - {name}:
        engine.abort(other)
    end = drain(engine)[name]
    again = attrs.evolve(
        request(name), request_id="again", prompt_token_ids=(*request(name).prompt_token_ids, *end.token_ids.tolist())
    )
    engine.add(again)
    # All 38 tokens but the last were computed; 9 blocks of 4 are full.
    assert drain(engine)["again"].num_cached_tokens == 36


def test_after_a_failed_step_nobody_comes_back_from_copies_that_may_be_wrong():
    """The step in flight while a sequence is swapped out fails: what it would have written is not in the copies."""
    failing: list[bool] = []

    def fails(batch, one):
        if failing and batch.num_sequences > 1:
            failing.pop()
            raise RuntimeError("this step failed")

    engine = under_pressure(backend=FakeBackend(eos=-1, max_model_len=80, fails=fails), async_scheduling=True)
    step_until(engine, lambda: bool(swapped(engine)))
    failing.append(True)
    engine.step()
    assert engine.totals.num_failed_steps == 1
    assert not [one for one in swapped(engine) if engine._state.table.num_swapped_tokens[one.slot] == 0]
    ends = drain(engine)
    assert all(ends[name].token_ids.tolist() == text_of(request(name)) for name in "abcd")


def test_policies_see_who_is_swapped_and_what_the_host_has_room_for():
    seen: list[tuple[int, int, int]] = []

    class Watching(SchedulingPolicy):
        def order(self, view: SchedulerView) -> np.ndarray:
            tokens = view.num_swapped_tokens[view.waiting]
            seen.append((view.num_swapped, int(np.count_nonzero(tokens)), view.num_free_host_blocks))
            return view.waiting

    engine = under_pressure(policy=Watching(), swap_blocks=64)
    engine.add(request("late", 8))
    drain(engine)
    assert (0, 0, 64) in seen
    assert any(num_swapped for num_swapped, _, _ in seen)
    assert all(num_swapped == num_with_tokens for num_swapped, num_with_tokens, _ in seen)
    assert min(room for _, _, room in seen) < 64


def test_steps_tell_what_was_swapped():
    class Steps(Observer):
        def __init__(self) -> None:
            self.seen: list[StepStats] = []

        def on_step(self, stats: StepStats) -> None:
            self.seen.append(stats)

    steps = Steps()
    engine = under_pressure(observers=[("steps", steps)], swap_blocks=8)
    drain(engine)
    totals = engine.totals
    for field in ("num_blocks_swapped_out", "num_blocks_swapped_in", "num_swap_fallbacks"):
        assert sum(getattr(one, field) for one in steps.seen) == getattr(totals, field) > 0
    assert max(one.num_swapped for one in steps.seen) >= 1
    assert steps.seen[-1].num_swapped == 0


# ------------------------------------------------------------------------------------------------ configuration


def test_recompute_takes_no_host_memory_and_host_holds_no_more_than_all_rows_could():
    assert "swap" not in make_engine(swap_blocks=50).inspect().stages
    assert swapping_engine(swap_blocks=10_000).stage("swap").num_host_blocks == 4 * 20


class CannotSwap(FakeExecutor):
    swap_blocks = None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_blocks": 0}, r'swap_bytes = 0.*at least one KV block of 64 bytes.*engine.preemption to "recompute"'),
        ({"backend": FakeBackend(swaps_blocks=False)}, r'preemption = "swap": the backend ".*" cannot copy'),
        ({"executor": CannotSwap()}, r'preemption = "swap": the executor ".*" cannot copy'),
    ],
    ids=["no room", "backend", "executor"],
)
def test_what_cannot_swap_is_refused_with_what_to_do(options, message):
    with pytest.raises(ConfigValueError, match=message):
        swapping_engine(**options)
