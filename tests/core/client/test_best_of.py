from __future__ import annotations

import math

import pytest

from trencadis.client.best_of import best_of, mean_logprob
from trencadis.records import CompletionOutput, FinishReason, TokenLogprobs


def made(index: int, *logprobs: float, reason: FinishReason = FinishReason.LENGTH) -> CompletionOutput:
    entries = tuple(
        TokenLogprobs(index=index, position=at, token_id=5, logprob=logprob, rank=1)
        for at, logprob in enumerate(logprobs)
    )
    return CompletionOutput(
        index=index, text=f"text {index}", token_ids=(5,) * len(logprobs), finish_reason=reason, logprobs=entries
    )


def test_the_largest_mean_comes_first_whatever_the_length() -> None:
    chosen = best_of([made(0, -3.0), made(1, -1.0, -2.0, -1.5), made(2, -1.0, -1.2)], 2, has_logprobs=False)
    assert [(one.index, one.text, one.score) for one in chosen] == [
        (0, "text 2", pytest.approx(-1.1)),
        (1, "text 1", pytest.approx(-1.5)),
    ]
    assert all(one.logprobs is None for one in chosen)


def test_log_probabilities_are_kept_for_who_asked_with_the_new_index() -> None:
    (best,) = best_of([made(0, -3.0), made(1, -1.0)], 1, has_logprobs=True)
    assert best.logprobs is not None
    assert [(entry.index, entry.logprob) for entry in best.logprobs] == [(0, -1.0)]


def test_equals_keep_their_order_and_what_failed_comes_last() -> None:
    failed = made(0, -0.1, reason=FinishReason.ERROR)
    chosen = best_of([failed, made(1, -2.0), made(2, -2.0)], 3, has_logprobs=False)
    assert [one.text for one in chosen] == ["text 1", "text 2", "text 0"]


def test_no_token_is_the_worst_text() -> None:
    assert mean_logprob(()) == -math.inf
