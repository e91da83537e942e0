from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import BlockCopies
from trencadis.records import FinishReason, Request, SamplingParams, StepTime
from trencadis_testing.engines import make_engine
from trencadis_testing.executor_fakes import one_token, plan_of
from trencadis_tools.bench.schedule import Line
from trencadis_tools.simulation.executor import SimulatedExecutor

STEP_TIME = Line(StepTime(base_s=1.0, token_s=0.01, context_token_s=0.001))


def engine_of(output_lens, **options):
    clock = SimulatedClock()
    executor = SimulatedExecutor(clock, STEP_TIME, output_lens, max_model_len=400)
    engine = make_engine(executor=executor, clock=clock, num_blocks=200, max_num_batched_tokens=100, **options)
    return engine, clock


def request(index: int, length: int, max_tokens: int = 50) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=index)
    return Request(request_id=str(index), prompt_token_ids=(index + 2,) * length, params=params)


def ends_of(engine):
    ends = {}
    while engine.has_work:
        ends.update((end.request_id, end) for end in engine.step().finished)
    return ends


@pytest.mark.parametrize("overlap", [False, True])
def test_texts_have_the_true_lengths_whoever_shares_the_batch(overlap: bool) -> None:
    lengths = [5, 1, 17, 8]
    engine, _ = engine_of(lengths, async_scheduling=overlap, max_num_seqs=3)
    for index in range(4):
        engine.add(request(index, 10 + 30 * index))
    ends = ends_of(engine)
    assert [len(ends[str(index)].token_ids) for index in range(4)] == lengths
    assert {end.finish_reason for end in ends.values()} == {FinishReason.STOP}


def test_texts_keep_their_lengths_through_preemptions() -> None:
    clock = SimulatedClock()
    executor = SimulatedExecutor(clock, STEP_TIME, [30] * 4, max_model_len=60)
    engine = make_engine(executor=executor, clock=clock, num_blocks=20, max_num_seqs=4)
    for index in range(4):
        engine.add(request(index, 12))
    ends = ends_of(engine)
    assert engine.totals.num_preempted > 0
    assert [len(end.token_ids) for end in ends.values()] == [30] * 4


def test_swapped_blocks_keep_the_device_busy_for_as_long_as_their_copies_take() -> None:
    """3 + 1 blocks of 4 tokens of 128 KiB at 20 GB/s, before a step of one token after no context."""
    clock = SimulatedClock()
    executor = SimulatedExecutor(clock, STEP_TIME, [1], max_model_len=64)
    executor.allocate(plan_of())
    three, one = np.arange(3, dtype=np.int32), np.arange(1, dtype=np.int32)
    executor.swap_blocks(outs=BlockCopies(sources=three, targets=three), ins=BlockCopies(sources=one, targets=one))
    batch = one_token(2)
    (start,) = batch.row_starts
    start = attrs.evolve(start, params=SamplingParams(seed=0))
    executor.submit(attrs.evolve(batch, row_starts=(start,))).wait()
    assert clock.now_s() == pytest.approx(4 * 4 * 131_072 / 20e9 + 1.011)


def test_preemption_by_swap_computes_nothing_twice() -> None:
    clock = SimulatedClock()
    executor = SimulatedExecutor(clock, STEP_TIME, [30] * 4, max_model_len=60)
    engine = make_engine(executor=executor, clock=clock, num_blocks=20, max_num_seqs=4, preemption="swap")
    for index in range(4):
        engine.add(request(index, 12))
    ends = ends_of(engine)
    assert engine.totals.num_blocks_swapped_in > 0
    assert engine.totals.num_recomputed_tokens == 0
    assert [len(end.token_ids) for end in ends.values()] == [30] * 4


def test_what_a_request_allows_still_ends_it() -> None:
    engine, _ = engine_of([40])
    engine.add(request(0, 10, max_tokens=6))
    end = ends_of(engine)["0"]
    assert (len(end.token_ids), end.finish_reason) == (6, FinishReason.LENGTH)


def test_time_is_that_of_the_model_exactly() -> None:
    """A prompt of 20 and three tokens: 1 + .2 + .02, then 1 + .01 + .021 and 1 + .01 + .022 s."""
    engine, clock = engine_of([3], async_scheduling=False)
    engine.add(request(0, 20))
    end = ends_of(engine)["0"]
    assert end.first_token_s == pytest.approx(1.22)
    assert end.finish_s == pytest.approx(1.22 + 1.031 + 1.032)
    assert clock.now_s() == end.finish_s
    assert engine.totals.device_s == pytest.approx(end.finish_s)


def test_steps_in_flight_run_one_after_the_other() -> None:
    engine, clock = engine_of([3], async_scheduling=True)
    engine.add(request(0, 20))
    engine.step()
    assert clock.now_s() == pytest.approx(1.22)
    engine.step()
    assert clock.now_s() == pytest.approx(1.22 + 1.031)


def test_an_idle_device_starts_when_there_is_work() -> None:
    engine, clock = engine_of([1, 1], async_scheduling=False)
    engine.add(request(0, 20))
    ends_of(engine)
    clock.advance(100.0)
    engine.add(request(1, 20))
    assert ends_of(engine)["1"].finish_s == pytest.approx(1.22 + 100 + 1.22)
