from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.interfaces import SamplingContext, Verification
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_plugins.speculation.draft_sampler import DraftSampler, Echo

VOCAB_SIZE = 6
LOGITS = torch.tensor([1.0, 3.0, 3.0, 0.0, -1.0, 2.0])


def context(rows: list[int], position: int = 4) -> SamplingContext:
    tokens = torch.zeros((max(rows) + 1, 16), dtype=torch.int32)
    return SamplingContext(rows=tuple(rows), positions=(position,) * len(rows), tokens=tokens)


def allocated(
    params: SamplingParams, *, num_rows: int = 1, static: bool = False, known: int = 5, **options: int
) -> DraftSampler:
    sampler = DraftSampler(**options)
    if static:
        sampler.use_static_shapes()
    sampler.allocate(num_rows=num_rows, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    start_rows(sampler, params, num_rows, known)
    return sampler


def start_rows(sampler: DraftSampler | StandardSampler, params: SamplingParams, num_rows: int, known: int = 5) -> None:
    for row in range(num_rows):
        tokens = np.zeros(known, np.int32)
        sampler.start_row(RowStart(row=row, token_ids=tokens, num_prompt_tokens=known, params=params, seed=1000 + row))


def test_greedy_rows_get_the_most_likely_token_the_lowest_of_equals() -> None:
    sampler = allocated(SamplingParams(temperature=0.0))
    sampler.begin()
    assert sampler.sample(LOGITS[None].clone(), context([0])).token_ids.tolist() == [1]
    (guesses,) = sampler.take()
    assert (guesses.rows, guesses.positions, guesses.distributions, guesses.top) == ((0,), (4,), None, None)


def test_closed_tokens_are_never_chosen() -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=5.0)):
        sampler = DraftSampler()
        sampler.close_tokens(np.array([False, True, True, False, False, False]))
        sampler.allocate(num_rows=200, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
        start_rows(sampler, params, 200)
        found = sampler.sample(LOGITS.expand(200, -1).clone(), context(list(range(200)))).token_ids
        assert not {1, 2} & set(found.tolist())


@pytest.mark.parametrize("static", [False, True])
def test_draws_have_the_distribution_that_is_told(static: bool) -> None:
    count = 5000
    sampler = allocated(SamplingParams(temperature=1.7, top_k=5, top_p=0.95), num_rows=count, static=static)
    sampler.begin()
    found = sampler.sample(LOGITS.expand(count, -1).clone(), context(list(range(count)))).token_ids
    distributions = sampler.take()[0].distributions
    assert distributions is not None
    expected = (LOGITS / 1.7).softmax(-1)
    expected[4] = 0.0  # the sixth of five
    assert torch.allclose(distributions[0], expected / expected.sum(), atol=1e-6)
    counts = np.bincount(found.numpy(), minlength=VOCAB_SIZE)
    assert counts[4] == 0
    kept = np.flatnonzero(counts)
    distribution = distributions[0].double().numpy()[kept] * count
    assert (
        (counts[kept] - distribution) ** 2 / distribution
    ).sum() < 33.4  # chi-square of 4 degrees of freedom at one in a million


def test_what_drafts_is_not_what_samples() -> None:
    # The same logits, seed, position and parameters: equal draws would make every draft right, and its distribution a lie.
    count, params = 2000, SamplingParams(temperature=1.0)
    target = StandardSampler(standard_chain("vllm"))
    target.allocate(num_rows=count, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    start_rows(target, params, count)
    logits, rows = torch.zeros(count, VOCAB_SIZE), context(list(range(count)))
    sampled = target.sample(logits.clone(), rows).token_ids
    drafted = allocated(params, num_rows=count).sample(logits.clone(), rows).token_ids
    again = allocated(params, num_rows=count, known=6).sample(logits.clone(), rows).token_ids
    for one, other in ((sampled, drafted), (drafted, again)):
        assert 0.1 < float((one == other).double().mean()) < 0.24  # a sixth


def test_a_token_depends_on_its_own_row_alone() -> None:
    sampler = allocated(SamplingParams(temperature=2.0), num_rows=8)
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    together = sampler.sample(logits.clone(), context(list(range(8)))).token_ids
    for row in range(8):
        assert sampler.sample(logits[row : row + 1].clone(), context([row])).token_ids[0] == together[row]


def test_the_most_likely_tokens_are_kept_with_their_log_probabilities() -> None:
    sampler = allocated(SamplingParams(temperature=0.0), num_kept=9)
    sampler.begin()
    sampler.sample(LOGITS[None].clone(), context([0]))
    (guesses,) = sampler.take()
    assert guesses.top is not None
    logprobs, tokens = guesses.top
    assert torch.allclose(logprobs[0], LOGITS.log_softmax(-1)[tokens[0]])
    assert logprobs[0].tolist() == sorted(logprobs[0].tolist(), reverse=True)
    assert tokens.shape == (1, VOCAB_SIZE)


def test_nothing_is_kept_before_the_begin_and_after_the_end() -> None:
    sampler = allocated(SamplingParams(temperature=0.0))
    sampler.sample(LOGITS[None].clone(), context([0]))
    sampler.begin()
    assert sampler.take() == []
    sampler.sample(LOGITS[None].clone(), context([0]))
    assert len(sampler.take()) == 1
    sampler.end()
    sampler.sample(LOGITS[None].clone(), context([0]))
    assert sampler.take() == []
    assert sampler.supports_drafts(SamplingParams(), branching=True)


def test_a_line_is_echoed_and_a_tree_leaves_no_trace() -> None:
    line = Verification(
        tokens=torch.tensor([[5, 6, 7], [8, -1, -1]]),
        parents=torch.tensor([[0, 1, 2]] * 2),
        num_drafts=torch.tensor([3, 1]),
        is_linear=True,
    )
    assert Echo().accept(line).tolist() == [[1, 1, 1], [1, 0, 0]]
    tree = Verification(
        tokens=torch.tensor([[5, 6]]), parents=torch.tensor([[0, 0]]), num_drafts=torch.tensor([2]), is_linear=False
    )
    assert Echo().accept(tree).tolist() == [[0, 0]]
