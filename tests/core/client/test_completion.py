from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.broken_tokenizers import panics_at_a_token
from trencadis.client.completion import Completion, TokenPrefix
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams, TokenLogprobs
from trencadis.text import Tokenizer, load_tokenizer


def make(tokenizer: Tokenizer, *, streams: bool = True, **params: object) -> Completion:
    request = Request(request_id="r", prompt_token_ids=(5,), params=SamplingParams(**{"max_tokens": None, **params}))
    return Completion(request, index=2, tokenizer=tokenizer, streams=streams)


def end(ids: list[int], reason: FinishReason = FinishReason.LENGTH, **more: object) -> FinishedSequence:
    return FinishedSequence(
        request_id="r", slot=0, token_ids=np.array(ids, np.int32), finish_reason=reason, num_prompt_tokens=1, **more
    )


def test_an_unwatched_completion_takes_everything_at_its_end(tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode(" one two"))
    completion = make(tokenizer, streams=False)
    assert not completion.is_watched
    completion.finish(end(ids, num_cached_tokens=4))
    output = completion.output()
    assert (output.index, output.text, output.token_ids) == (2, " one two", tuple(ids))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)
    assert completion.ended.num_cached_tokens == 4


def test_an_output_stays_as_it_was_while_the_completion_grows(tokenizer: Tokenizer) -> None:
    completion = make(tokenizer)
    completion.append((5, 6))
    early = completion.output()
    completion.append((7,))
    completion.finish(end([5, 6, 7]))
    late = completion.output()
    assert (early.token_ids, late.token_ids) == ((5, 6), (5, 6, 7))
    assert type(late.token_ids) is tuple


def test_tokens_after_a_stop_string_are_dropped_until_the_engine_ends_it(tokenizer: Tokenizer) -> None:
    # An engine in another process makes some more before it learns that the text is complete.
    ids = tokenizer.encode("one two")
    completion = make(tokenizer, stop=[" two"], logprobs=0)
    assert completion.append(ids)
    before = completion.output()
    assert not completion.append(tokenizer.encode(" three two"))
    assert completion.output() == before
    completion.finish(end([*ids, 5, 6], FinishReason.STOP))
    output = completion.output()
    assert (output.text, output.token_ids, output.stop_reason) == ("one", tuple(ids), " two")


def test_a_completion_that_never_ran_says_why(tokenizer: Tokenizer) -> None:
    completion = make(tokenizer)
    completion.fail("it was refused.")
    assert (completion.output().finish_reason, completion.error) == (FinishReason.IGNORED, "it was refused.")


def test_logprobs_are_given_to_those_who_asked_and_no_more_than_there_are_tokens(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(index=9, position=1, token_id=5, logprob=-1.0, rank=1)
    ids = list(tokenizer.encode("one two"))
    asked, no_answer = make(tokenizer, stop=["on"], logprobs=0), make(tokenizer)
    for completion in (asked, no_answer):
        for _ in ids:
            completion.add_logprobs(entry)
        completion.append(ids)
    logprobs = asked.output().logprobs
    assert logprobs is not None
    assert len(logprobs) == len(asked.output().token_ids) < len(ids)
    assert {entry.index for entry in logprobs} == {2}
    assert no_answer.output().logprobs is None


def test_an_error_is_kept_with_the_text_so_far(tokenizer: Tokenizer) -> None:
    completion = make(tokenizer, streams=False)
    completion.finish(end(list(tokenizer.encode("one")), FinishReason.ERROR, error="the device is gone"))
    assert completion.output().text == "one"
    assert completion.error == "the device is gone"


def test_a_prefix_stays_as_it_was_while_its_list_grows() -> None:
    tokens = [5, 6, 7]
    prefix = TokenPrefix(tokens, 3)
    tokens += [8, 9]
    assert prefix == (5, 6, 7)
    assert [*prefix] == [5, 6, 7]
    assert len(prefix) == 3
    assert prefix != (5, 6, 7, 8)
    assert prefix == TokenPrefix([5, 6, 7], 3)


def test_a_prefix_behaves_as_the_tuple_that_it_equals() -> None:
    whole = (5, 6, 7, 8)
    prefix = TokenPrefix([*whole, 9, 10], 4)
    for start in (None, 0, 2, 4, 9, -1, -9):
        for stop in (None, 0, 2, 4, 9, -1, -9):
            for step in (None, 1, 2, -1, -2):
                assert prefix[start:stop:step] == whole[start:stop:step]
    assert [prefix[i] for i in (0, 3, -1, -4)] == [5, 8, 8, 5]
    assert {prefix: 1}[whole] == 1  # type: ignore[index]
    assert repr(prefix) == repr(whole)
    for index in (4, -5):
        try:
            prefix[index]
        except IndexError:
            continue
        raise AssertionError(index)


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("streams", [True, False])
def test_tokens_at_which_the_tokenizer_fails_fail_the_completion_in_words(
    tmp_path: Path, tokenizer: Tokenizer, streams: bool, stop: tuple[str, ...]
) -> None:
    good, bad = tokenizer.encode("Hello"), tokenizer.encode("x")
    completion = make(load_tokenizer(panics_at_a_token(tmp_path, "x")), streams=streams, stop=stop)
    if completion.is_watched:
        assert not completion.append(good)
        assert completion.append(bad), "the engine is told to stop"
        assert not completion.append(good)
    completion.finish(end([*good, *bad, *good], FinishReason.ABORT))
    output = completion.output()
    assert (output.finish_reason, output.stop_reason) == (FinishReason.ERROR, None)
    assert "the tokenizer failed: PanicException" in completion.error


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one two")])
def test_a_stop_string_ends_text_and_tokens(tokenizer: Tokenizer, include: bool, text: str) -> None:
    ids = list(tokenizer.encode("one two three four"))
    num_kept = next(size for size in range(len(ids)) if "two" in tokenizer.decode(ids[:size]))
    completion = make(tokenizer, stop=[" two"], include_stop_str_in_output=include)
    assert completion.append(ids)
    completion.finish(end(ids, FinishReason.STOP))
    output = completion.output()
    assert output.text == text
    assert output.token_ids == tuple(ids[:num_kept])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, " two")


def test_no_stop_string_is_found_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), *tokenizer.encode("a"), *tokenizer.encode("b"), *tokenizer.encode("a")]
    completion = make(tokenizer, stop=["a"], min_tokens=2)
    assert completion.append(ids)
    assert completion.output().text == "aab"


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one two")])
def test_a_stop_token_is_kept_as_a_token_but_not_as_text(
    tokenizer: Tokenizer, streams: bool, include: bool, text: str
) -> None:
    one, two = tokenizer.encode("one"), tokenizer.encode(" two")
    ids = [*one, *two]
    assert len(two) == 1
    completion = make(tokenizer, streams=streams, stop_token_ids=two, include_stop_str_in_output=include)
    if streams:
        completion.append(ids, ends_with_stop_token=True)
    completion.finish(end(ids, FinishReason.STOP, stop_token_id=two[0]))
    output = completion.output()
    assert (output.text, output.token_ids, output.stop_reason) == (text, tuple(ids), two[0])
