from __future__ import annotations

import msgspec
import pytest

from trencadis.client.beam_request import BeamRequest
from trencadis.errors import InvalidRequestError
from trencadis.records import (
    BeamSearchParams,
    CompletionOutput,
    FinishReason,
    ModelFacts,
    RequestOutput,
    TokenLogprobs,
)
from trencadis.text import Tokenizer

MODEL = ModelFacts(
    architecture="Toy",
    dtype="float32",
    vocab_size=4096,
    max_model_len=64,
    eos_token_ids=(0,),
    num_parameters=1,
    weights_bytes=1,
    kv_bytes_per_token=1,
)
PROMPT = (5, 6, 7)
HELLO, THERE = 300, 301


def make(tokenizer: Tokenizer, prompt: str | tuple[int, ...] = PROMPT, **params: object) -> BeamRequest:
    given = BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **params})  # type: ignore[arg-type]
    return BeamRequest(prompt, given, request_id="r", tokenizer=tokenizer, model=MODEL, max_model_len=64)


def answer(*offered: tuple[int, float], reason: FinishReason = FinishReason.LENGTH, error: str = "") -> RequestOutput:
    """The finished output of a beam that was offered tokens with their log-probabilities."""
    entry = TokenLogprobs(
        index=0,
        position=3,
        token_id=9,
        logprob=-9.0,
        rank=9,
        top_token_ids=tuple(token for token, _ in offered),
        top_logprobs=tuple(logprob for _, logprob in offered),
    )
    one = CompletionOutput(
        index=0, text="", token_ids=(9,), finish_reason=reason, logprobs=(entry,) if offered else None
    )
    return RequestOutput(
        request_id="r/0", prompt=None, prompt_token_ids=PROMPT, outputs=(one,), finished=True, error=error,
        num_cached_tokens=2,
    )  # fmt: skip


def test_each_live_beam_is_asked_for_one_token_with_enough_alternatives(tokenizer: Tokenizer) -> None:
    search = make(tokenizer)
    assert search.prompts() == [PROMPT]
    assert (search.step_params.max_tokens, search.step_params.is_greedy, search.step_params.logprobs) == (1, True, 3)
    search.take([answer((HELLO, -0.1), (THERE, -1.0), (0, -2.0))])
    assert search.prompts() == [(*PROMPT, HELLO), (*PROMPT, THERE)]


def test_the_output_has_texts_scores_reasons_and_what_came_from_the_cache(tokenizer: Tokenizer) -> None:
    search = make(tokenizer, length_penalty=2.0)
    search.take([answer((HELLO, -0.5), (0, -1.0), (THERE, -9.0))])
    search.take([answer((THERE, -0.5), (0, -5.0), (1, -6.0)), answer((THERE, -7.0), (0, -8.0), (1, -9.0))])
    assert search.is_finished
    output = search.output()
    first, second = output.outputs
    assert (first.index, first.token_ids, first.score) == (0, (HELLO, THERE), -1.0 / 4)
    assert first.text == tokenizer.decode([HELLO, THERE])
    assert (first.finish_reason, first.stop_reason) == (FinishReason.LENGTH, None)
    assert (second.index, second.token_ids, second.score, second.text) == (1, (0,), -1.0, "")
    assert (second.finish_reason, second.stop_reason) == (FinishReason.STOP, None)
    assert (output.finished, output.prompt, output.prompt_token_ids, output.num_cached_tokens) == (
        True,
        None,
        PROMPT,
        2,
    )
    assert first.logprobs is None


def test_log_probabilities_are_those_along_the_beam(tokenizer: Tokenizer) -> None:
    search = make(tokenizer, logprobs=1, n=1)
    search.take([answer((HELLO, -0.5), (THERE, -1.0), (0, -8.0))])
    search.take([answer((THERE, -4.0), (0, -5.0), (1, -6.0)), answer((1, -0.2), (HELLO, -0.2), (0, -3.0))])
    (only,) = search.output().outputs
    assert only.token_ids == (THERE, 1)
    assert only.logprobs is not None
    assert [msgspec.structs.astuple(entry) for entry in only.logprobs] == [
        (0, 3, THERE, -1.0, 2, (HELLO,), (-0.5,)),
        (0, 4, 1, -0.2, 1, (1,), (-0.2,)),
    ]


def test_what_ends_a_text_is_the_models_and_the_clients(tokenizer: Tokenizer) -> None:
    assert make(tokenizer, stop_token_ids=[HELLO]).step_params.logprobs == 2 + 2
    assert make(tokenizer, ignore_eos=True).step_params.logprobs == 2
    search = make(tokenizer, stop_token_ids=[HELLO], include_stop_str_in_output=True, early_stopping=True)
    search.take([answer((HELLO, -0.5), (0, -1.0), (THERE, -2.0), (1, -3.0))])
    assert search.is_finished
    assert [one.text for one in search.output().outputs] == [tokenizer.decode([HELLO]), ""]


def test_there_are_never_more_tokens_than_the_model_has_room_for(tokenizer: Tokenizer) -> None:
    search = make(tokenizer, tuple(range(1, 64)), max_tokens=None)
    search.take([answer((HELLO, -0.1), (THERE, -1.0), (0, -2.0))])
    assert search.is_finished


def test_a_prompt_may_be_text(tokenizer: Tokenizer) -> None:
    search = make(tokenizer, "Hello there")
    assert search.prompts() == [tokenizer.encode("Hello there")]
    assert search.output().prompt == "Hello there"


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_beam_that_fails_ends_the_search_and_says_why(tokenizer: Tokenizer, reason: FinishReason) -> None:
    search = make(tokenizer)
    search.take([answer(reason=reason, error="the device is gone")])
    assert search.is_finished
    (only,) = search.output().outputs
    assert (only.finish_reason, only.text, search.output().error) == (reason, "", "the device is gone")


def test_a_sampler_without_log_probabilities_is_named_as_the_cause(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="sampler of this engine reports none"):
        make(tokenizer).take([answer()])


def test_more_alternatives_than_there_are_is_refused_with_the_widest_that_works(tokenizer: Tokenizer) -> None:
    make(tokenizer, beam_width=49)
    with pytest.raises(InvalidRequestError, match=r"beam_width = 49 and 2 tokens.*need 51.*") as caught:
        make(tokenizer, beam_width=49, stop_token_ids=[7])
    assert "Lower beam_width to 48" in str(caught.value.hint)
