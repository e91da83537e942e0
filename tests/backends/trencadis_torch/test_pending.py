from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch

from support.backends.passes import make_pass
from trencadis.clock import SimulatedClock
from trencadis.errors import StepFailedError
from trencadis.interfaces import AllocationPlan, SampledLogprobs
from trencadis.records import Bucket, RowError
from trencadis_torch.pending import StepTimer, TorchStep, _outside
from trencadis_torch.prompt_logprobs import PromptPlan, score_prompt
from trencadis_torch.rows import Rows
from trencadis_torch.verify import Emitted

CPU = torch.device("cpu")


def emitted(indices, tokens, counts=None, logprobs=()):
    return Emitted(
        indices=np.array(indices, np.int32),
        token_ids=torch.tensor(tokens),
        num_emitted=None if counts is None else torch.tensor(counts),
        logprobs=logprobs,
    )


def step(*passes, timer=None, num_sequences=5):
    return TorchStep(
        num_sequences=num_sequences,
        emitted=passes,
        prompts=(),
        num_padded_tokens=9,
        timer=timer or StepTimer(CPU, SimulatedClock()),
    )


def test_tokens_of_several_passes_come_in_the_order_of_the_plan():
    output = step(emitted([1, 4], [[10, 11, 12], [40, 41, 42]], [2, 3]), emitted([3, 0], [[30], [1]])).wait()
    assert output.token_ids.tolist() == [1, 10, 11, 30, 40, 41, 42]
    assert output.num_emitted.tolist() == [1, 2, 0, 1, 3]
    assert output.token_ids.dtype == output.num_emitted.dtype == np.int32
    assert output.num_padded_tokens == 9


def test_rows_of_padding_behind_the_sequences_are_cut_off():
    output = step(emitted([1, 4], [[10, 11], [40, 41], [10, 11]], [2, 1, 2])).wait()
    assert output.token_ids.tolist() == [10, 11, 40]
    assert output.num_emitted.tolist() == [0, 2, 0, 0, 1]


def test_a_token_that_the_model_does_not_know_is_an_error_of_its_sequence_where_the_device_is_another():
    one = attrs.evolve(
        emitted([1, 4, 2], [[10, 1 << 40], [1 << 40, 5], [-3, 5]], [1, 2, 1]), vocab_size=50, chosen_by="S"
    )
    wide = one.token_ids.numpy()
    found = _outside(one, wide, np.array([0, 1, 1, 0, 2], np.int32))
    assert [(error.index, error.message) for error in found] == [
        (4, f"S: it chose token {1 << 40}; the model knows 0 to 49"),
        (2, "S: it chose token -3; the model knows 0 to 49"),
    ]
    assert _outside(attrs.evolve(one, indices=one.indices[:1]), wide[:, :1].copy(), np.ones(5, np.int32)) == []


def test_the_error_of_a_sequence_takes_its_tokens_and_no_others():
    error = RowError(index=4, message="none")
    output = step(attrs.evolve(emitted([1, 4], [[10, 11], [40, 41]], [2, 1]), row_errors=(error,))).wait()
    assert output.token_ids.tolist() == [10, 11]
    assert output.num_emitted.tolist() == [0, 2, 0, 0, 0]
    assert output.row_errors == (error,)


def test_errors_that_are_known_when_the_step_is_done_take_the_tokens_of_their_sequences():
    late = RowError(index=1, message="not a number")
    passes = attrs.evolve(emitted([1, 4], [[10, 11], [40, 41]], [2, 1]), late_errors=lambda: (late,))
    output = step(passes).wait()
    assert output.token_ids.tolist() == [40]
    assert output.row_errors == (late,)


def test_logprobs_of_tokens_that_did_not_stand_are_dropped():
    entry = SampledLogprobs(index=0, token_id=7, logprob=-0.5, rank=1, top_token_ids=(7,), top_logprobs=(-0.5,))
    asked = ((4, 0, 21, entry), (4, 1, 22, entry), (1, 1, 9, entry), (1, 0, 8, entry))
    output = step(emitted([1, 4], [[10, 11], [40, 41]], [2, 1], asked)).wait()
    assert [(record.index, record.position) for record in output.logprobs] == [(1, 8), (1, 9), (4, 21)]
    assert output.logprobs[0].top_logprobs == (-0.5,)


def test_step_without_passes_is_empty():
    output = step(num_sequences=0).wait()
    assert (output.token_ids.tolist(), output.num_emitted.tolist()) == ([], [])


def test_duration_is_read_from_the_clock():
    clock = SimulatedClock()
    timer = StepTimer(CPU, clock)
    clock.advance(0.25)
    pending = step(timer=timer)
    clock.advance(10)
    assert pending.wait().device_s == 0.25


def test_error_of_the_device_names_the_backend():
    class Broken(StepTimer):
        def wait(self):
            raise RuntimeError("illegal memory access")

    with pytest.raises(StepFailedError, match="torch: illegal memory access"):
        step(timer=Broken(CPU, SimulatedClock())).wait()


PLAN = AllocationPlan(num_blocks=9, block_size=4, num_rows=3, max_model_len=40, max_num_batched_tokens=8)


def one_pass(num_prompt_logits):
    return make_pass(Bucket(2, 4, 0), [2, 1], [0, 6], [3, 4], [0, 0], num_prompt_logits, indices=[0, 3])


def test_next_token_is_scored_at_each_position():
    rows = Rows(PLAN, torch.device("cpu"))
    rows.prompt_logprobs = [0, 2, 1]
    rows.tokens[2, 1], rows.tokens[1, 7:9] = 4, torch.tensor([0, 3]).int()
    plan = PromptPlan.of(one_pass((1, 2)), np.array([0, 3]), rows)
    assert plan.tokens.tolist() == [0, 3, 4]
    shares = [[0.1, 0.2, 0.3, 0.15, 0.25], [0.4, 0.3, 0.1, 0.1, 0.1], [0.05, 0.5, 0.2, 0.2, 0.05]]
    first, second, third = score_prompt(torch.tensor(shares).log() + 3, plan, rows).records()
    assert (first.index, first.position, first.token_id, first.rank, first.top_token_ids) == (0, 1, 4, 2, (2,))
    assert math.isclose(first.logprob, math.log(0.25), rel_tol=1e-5)
    assert (second.index, second.position, second.token_id, second.rank) == (3, 7, 0, 1)
    assert second.top_token_ids == (0, 1)
    assert math.isclose(second.top_logprobs[1], math.log(0.3), rel_tol=1e-5)
    assert (third.position, third.token_id, third.rank) == (8, 3, 2)


def test_many_positions_are_scored_slice_by_slice():
    rows = Rows(PLAN, torch.device("cpu"))
    one = one_pass((3, 4))
    plan = PromptPlan.of(one, np.array([0, 3]), rows)
    plan = PromptPlan(**{name: np.tile(getattr(plan, name), 20) for name in plan.__slots__ if name != "__weakref__"})
    logits = torch.randn(140, 7, generator=torch.Generator().manual_seed(0))
    found = score_prompt(logits, plan, rows)
    torch.testing.assert_close(found.logprobs, logits.log_softmax(-1)[:, 0])
    assert found.top_token_ids.shape == (140, 0)


def test_nothing_is_planned_if_nobody_asked():
    assert PromptPlan.of(one_pass((0, 0)), np.array([0, 3]), Rows(PLAN, torch.device("cpu"))) is None
