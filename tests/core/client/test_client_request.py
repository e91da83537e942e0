from __future__ import annotations

import numpy as np

from trencadis.client.client_request import ClientRequest
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams, TokenLogprobs
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
