from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_plugins.sampling import trencadis_samplers
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.logprobs import LogprobReporter
from trencadis_plugins.sampling.standard import StandardSampler


def _report(logits, starts, tokens, context_of):
    reporter = LogprobReporter(8)
    for start in starts:
        reporter.start_row(start)
    raw = reporter.keep(logits, context_of(starts))
    logits.zero_()  # a chain works in place
    return reporter.report(raw, torch.tensor(tokens))


def test_they_equal_the_whole_log_softmax(start, context_of):
    logits = torch.randn((3, 1000), generator=torch.Generator().manual_seed(0)) * 5
    expected = logits.double().log_softmax(-1)
    first, last = _report(logits, [start(0, logprobs=5), start(1), start(2, logprobs=0)], [17, 18, 19], context_of)
    assert (first.index, first.token_id, last.index, last.token_id) == (0, 17, 2, 19)
    assert first.logprob == pytest.approx(expected[0, 17].item(), abs=1e-6)
    assert first.rank == 1 + (expected[0] > expected[0, 17]).sum()
    top = expected[0].topk(5)
    assert first.top_token_ids == tuple(top.indices.tolist())
    assert first.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-6)
    assert (last.top_token_ids, last.top_logprobs) == ((), ())


def test_probabilities_of_all_tokens_sum_to_one(start, context_of):
    (entry,) = _report(torch.tensor([[3.0, -80.0, 2.5, 0.1]]), [start(0, logprobs=4)], [1], context_of)
    assert np.exp(entry.top_logprobs).sum() == pytest.approx(1, abs=1e-6)
    assert entry.rank == 4


def test_equal_tokens_share_a_rank_and_are_listed_by_id(start, context_of):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]], dtype=torch.bfloat16)
    (entry,) = _report(logits, [start(0, logprobs=3)], [5], context_of)
    assert entry.rank == 3
    assert entry.top_token_ids == (1, 3, 2)


def test_more_alternatives_than_tokens_and_impossible_tokens_are_reported_as_they_are(start, context_of):
    (entry,) = _report(torch.tensor([[0.0, -math.inf]]), [start(0, logprobs=50)], [0], context_of)
    assert entry.top_token_ids == (0, 1)
    assert entry.top_logprobs == (0.0, -math.inf)


def test_nothing_is_kept_if_no_row_asked(start, context_of):
    assert _report(torch.zeros((1, 4)), [start(0)], [0], context_of) == ()


def test_rows_that_want_some_are_known(start, context_of):
    reporter = LogprobReporter(8)
    starts = [start(0, logprobs=0), start(3), start(5, logprobs=2)]
    for one in starts:
        reporter.start_row(one)
    assert reporter.applies_to(context_of(starts)).tolist() == [True, False, True]


# ------------------------------------------------------------------------------------------ processed, by a sampler

VOCAB_SIZE = 90
ROWS = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "logprobs": 5},
    {
        "temperature": 0.0,
        "top_k": 3,
        "logit_bias": {4: 2.0},
        "bad_token_ids": (7,),
        "frequency_penalty": 0.5,
        "logprobs": 3,
    },
    {"temperature": 1.3, "logprobs": None},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.05, "allowed_token_ids": tuple(range(3, 30)), "logprobs": 0},
    {"temperature": 0.8, "xtc_probability": 0.9, "no_repeat_ngram_size": 2, "logprobs": 4},
]


def _by_sampling(sampler, logits, context):
    return sampler.sample(logits, context)


def _by_a_rule(sampler, logits, context):
    """The rule takes the likeliest token of each distribution."""
    return sampler.verify(logits, context, lambda distributions: distributions.probabilities.argmax(-1))


@pytest.mark.parametrize("answer_of", [_by_sampling, _by_a_rule])
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("num_rows", [2, len(ROWS)], ids=["without a processor of the host", "with one"])
def test_processed_ones_are_those_of_the_distribution_that_a_token_is_drawn_from(
    answer_of, is_static, num_rows, start, context_of, process
):
    starts = [start(row, [5, 6], [7, 8], row_seed=row, **params) for row, params in enumerate(ROWS[:num_rows])]
    logits = torch.randn((num_rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(3)) * 2
    component = next(iter(trencadis_samplers()))
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    sampler = component.factory(component.config(logprobs="processed"), context)
    if is_static:
        sampler.use_static_shapes()
    sampler.allocate(num_rows=8, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    for one in starts:
        sampler.start_row(one)
    context = context_of(starts)
    answer = answer_of(sampler, logits.clone(), attrs.evolve(context, tokens=context.tokens.clamp(min=0)))

    wanted = [row for row in range(num_rows) if ROWS[row]["logprobs"] is not None]
    assert [entry.index for entry in answer.logprobs] == wanted
    for entry in answer.logprobs:
        one = starts[entry.index]
        # Of a greedy row, what cannot move the maximum is left out.
        chain = [step for step in standard_chain("vllm") if not (one.params.is_greedy and step.argmax_invariant)]
        alone = attrs.evolve(one, row=0)
        expected = process(chain, logits[entry.index : entry.index + 1], [alone])[0].double().log_softmax(-1)
        token = answer.token_ids.tolist()[entry.index]
        assert (entry.token_id, entry.rank) == (token, 1 + int((expected > expected[token]).sum()))
        assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-5)
        top = expected.topk(one.params.logprobs)
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
        assert entry.top_token_ids == tuple(top.indices.tolist())


def test_reporting_processed_ones_changes_no_token(start, context_of):
    starts = [start(row, row_seed=row, **{"logprobs": 1, **params}) for row, params in enumerate(ROWS)]
    logits = torch.randn((len(ROWS), VOCAB_SIZE), generator=torch.Generator().manual_seed(4))
    tokens = []
    for processed in (False, True):
        sampler = StandardSampler(standard_chain("vllm"), reports_processed=processed)
        sampler.allocate(num_rows=8, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
        for one in starts:
            sampler.start_row(one)
        tokens.append(sampler.sample(logits.clone(), context_of(starts)).token_ids.tolist())
    assert tokens[0] == tokens[1]
