from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.logprobs import LogprobReporter


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
