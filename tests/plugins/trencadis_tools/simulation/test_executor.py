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
