from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from trencadis.client.client_request import ClientRequest, best_of, expand, mean_logprob
from trencadis.records import CompletionOutput, FinishedSequence, FinishReason, Request, SamplingParams, TokenLogprobs
from trencadis.text import Tokenizer


def make(tokenizer: Tokenizer, **params: object) -> ClientRequest:
    request = Request(request_id="r", prompt_token_ids=(5, 6, 7), params=SamplingParams(**params))
    return ClientRequest(request, prompt="abc", tokenizer=tokenizer, streams=False)


def end(request_id: str, ids: tuple[int, ...], reason: FinishReason, error: str = "") -> FinishedSequence:
    tokens = np.array(ids, np.int32)
    return FinishedSequence(
        request_id=request_id, slot=0, token_ids=tokens, finish_reason=reason, num_prompt_tokens=3, error=error
    )


def entry(position: int, logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(index=8, position=position, token_id=5, logprob=logprob, rank=1)


def test_completions_are_merged_by_index_whichever_ends_first(tokenizer: Tokenizer) -> None:
    client = make(tokenizer, n=2)
    client.finish(client.completions[1], end("r/1", (9,), FinishReason.LENGTH))
    assert not client.is_finished
    assert not client.output().finished
    client.finish(client.completions[0], end("r/0", (8,), FinishReason.LENGTH))
    output = client.output()
    assert output.finished
    assert [(one.index, one.token_ids) for one in output.outputs] == [(0, (8,)), (1, (9,))]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "abc", (5, 6, 7))


def test_the_error_of_a_failed_completion_is_the_requests(tokenizer: Tokenizer) -> None:
    client = make(tokenizer, n=2)
    client.finish(client.completions[0], end("r/0", (8,), FinishReason.ABORT, error="not this one"))
    client.finish(client.completions[1], end("r/1", (), FinishReason.ERROR, error="the device is gone"))
    assert client.output().error == "the device is gone"


def test_prompt_logprobs_are_sorted_and_a_recomputed_prompt_gives_none_twice(tokenizer: Tokenizer) -> None:
    client = make(tokenizer, prompt_logprobs=0)
    for position in (2, 1, 2):
        client.add_prompt_logprobs(entry(position))
    logprobs = client.output().prompt_logprobs
    assert logprobs is not None
    assert [(one.index, one.position) for one in logprobs] == [(0, 1), (0, 2)]


def test_prompt_logprobs_are_none_for_who_did_not_ask(tokenizer: Tokenizer) -> None:
    client = make(tokenizer)
    client.add_prompt_logprobs(entry(1))
    assert client.output().prompt_logprobs is None


def test_best_of_returns_the_likeliest_and_counts_the_tokens_of_the_others(tokenizer: Tokenizer) -> None:
    client = make(tokenizer, n=1, best_of=3)
    assert not client.streams
    for index, (tokens, logprob) in enumerate([((8, 8), -3.0), ((9, 9, 9), -1.0), ((7,), -2.0)]):
        for position in range(len(tokens)):
            client.completions[index].add_logprobs(entry(3 + position, logprob))
        client.finish(client.completions[index], end(f"r/{index}", tokens, FinishReason.LENGTH))
        assert client.output().outputs == () or client.is_finished
    output = client.output()
    (best,) = output.outputs
    assert (best.index, best.token_ids, best.score, best.logprobs) == (0, (9, 9, 9), -1.0, None)
    assert output.num_discarded_tokens == 3


def test_where_nothing_is_chosen_there_is_no_score_and_nothing_is_discarded(tokenizer: Tokenizer) -> None:
    client = make(tokenizer, n=2, best_of=2)
    for index in range(2):
        client.finish(client.completions[index], end(f"r/{index}", (8,), FinishReason.LENGTH))
    assert [one.score for one in client.output().outputs] == [None, None]
    assert client.output().num_discarded_tokens == 0


def request(**params: object) -> Request:
    return Request(request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(**params), tenant="t", priority=3)


def test_each_completion_has_its_own_name_and_the_seed_counted_up() -> None:
    parts = expand(request(n=3, seed=5, temperature=0.5))
    assert [part.request_id for part in parts] == ["r/0", "r/1", "r/2"]
    assert [part.params.seed for part in parts] == [5, 6, 7]
    assert all(part.params.n == 1 and part.params.temperature == 0.5 for part in parts)
    assert all((part.tenant, part.priority, part.prompt_token_ids) == ("t", 3, (1, 2)) for part in parts)


def test_the_largest_seed_wraps_around() -> None:
    assert [part.params.seed for part in expand(request(n=2, seed=2**63 - 1))] == [2**63 - 1, 0]


def test_prompt_logprobs_are_computed_once() -> None:
    assert [part.params.prompt_logprobs for part in expand(request(n=3, prompt_logprobs=2))] == [2, None, None]


def test_best_of_runs_so_many_and_reports_what_is_needed_to_choose() -> None:
    parts = expand(request(n=2, best_of=4, seed=5))
    assert [part.request_id for part in parts] == ["r/0", "r/1", "r/2", "r/3"]
    assert [part.params.seed for part in parts] == [5, 6, 7, 8]
    assert {(part.params.n, part.params.best_of, part.params.logprobs) for part in parts} == {(1, None, 0)}


def test_log_probabilities_that_were_asked_for_stay_as_they_are() -> None:
    assert {part.params.logprobs for part in expand(request(best_of=2, logprobs=3))} == {3}
    assert {part.params.logprobs for part in expand(request(n=2, best_of=2))} == {None}


def test_one_prefix_is_handed_over_once() -> None:
    one = attrs.evolve(request(n=3), transfer_params={"a": 1})
    assert [part.transfer_params for part in expand(one)] == [{"a": 1}, None, None]


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


def test_equals_keep_their_order_and_what_failed_comes_last() -> None:
    failed = made(0, -0.1, reason=FinishReason.ERROR)
    chosen = best_of([failed, made(1, -2.0), made(2, -2.0)], 3, has_logprobs=False)
    assert [one.text for one in chosen] == ["text 1", "text 2", "text 0"]


def test_no_token_is_the_worst_text() -> None:
    assert mean_logprob(()) == -math.inf
