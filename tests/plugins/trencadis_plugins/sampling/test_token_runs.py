from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.token_runs import BadWords, NoRepeatNgram


def _histories(rng, num_rows, *, longest=40):
    return [rng.integers(0, 6, rng.integers(1, longest)).tolist() for _ in range(num_rows)]


def _warp(name, histories, logits, *args):
    from transformers.generation import logits_process

    one = getattr(logits_process, name)
    return torch.cat(
        [one(*args)(torch.tensor([history]), row[None].clone()) for history, row in zip(histories, logits, strict=True)]
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_run_occurs_twice_as_in_transformers(size, process, start):
    histories = _histories(np.random.default_rng(size), 350)
    logits = torch.randn((350, 8), generator=torch.Generator().manual_seed(0))
    starts = [start(row, history[:3], history[3:], no_repeat_ngram_size=size) for row, history in enumerate(histories)]
    assert torch.equal(
        process(NoRepeatNgram(), logits, starts), _warp("NoRepeatNGramLogitsProcessor", histories, logits, size)
    )


def test_bad_words_are_never_completed_as_in_transformers(process, start):
    words = ((1,), (2, 3), (0, 1, 2), (4, 4, 4, 5), (3, 0), (5, 3), (2,))
    histories = _histories(np.random.default_rng(9), 350)
    logits = torch.randn((350, 8), generator=torch.Generator().manual_seed(1))
    starts = [start(row, history, bad_words_ids=words) for row, history in enumerate(histories)]
    expected = _warp("NoBadWordsLogitsProcessor", histories, logits, [list(word) for word in words], [7])
    assert torch.equal(process(BadWords(), logits, starts), expected)


def test_first_token_of_another_engine_completes_no_bad_word_and_repeats_no_n_gram(start):
    """The prompt may have begun what is ruled out."""
    words = start(0, [7, 5, 6], bad_words_ids=((5, 6, 9), (1, 2, 3, 4, 8), (4,)))
    assert [token for token in range(10) if not BadWords().can_start_with(words, token)] == [4, 9]
    grams = start(0, [1, 2, 3, 1, 2], no_repeat_ngram_size=3)
    assert [token for token in range(10) if not NoRepeatNgram().can_start_with(grams, token)] == [3]
