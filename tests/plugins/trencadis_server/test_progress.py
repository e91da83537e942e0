from __future__ import annotations

from trencadis.records import CompletionOutput, FinishReason, TokenLogprobs
from trencadis_server.generation.progress import Progress, finish_name


def entry(position: int) -> TokenLogprobs:
    return TokenLogprobs(index=0, position=position, token_id=position, logprob=-1.0, rank=1)


def output(num_tokens: int, *, has_logprobs: bool = True) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text="ab" * num_tokens,
        token_ids=tuple(range(num_tokens)),
        logprobs=tuple(entry(i) for i in range(num_tokens)) if has_logprobs else None,
    )


def test_each_call_gives_what_is_new() -> None:
    progress = Progress()
    assert progress.take(output(1)) == ("ab", (0,), (entry(0),))
    assert progress.take(output(1)) == ("", (), ())
    assert progress.take(output(3)) == ("abab", (1, 2), (entry(1), entry(2)))


def test_without_logprobs_there_are_none() -> None:
    assert Progress().take(output(2, has_logprobs=False)) == ("abab", (0, 1), ())


def test_reasons_have_the_names_of_openai() -> None:
    names = {
        reason: finish_name(CompletionOutput(index=0, text="", token_ids=(), finish_reason=reason))
        for reason in (FinishReason.STOP, FinishReason.LENGTH)
    }
    assert names == {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def test_token_ids_that_nobody_wants_are_not_looked_for() -> None:
    progress = Progress(has_token_ids=False)
    assert [progress.take(output(size))[:2] for size in (1, 3)] == [("ab", ()), ("abab", ())]
