"""Answers of text completions, whole and in chunks."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from trencadis.records import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from trencadis.text import Tokenizer
from trencadis_server.generation.completion_writer import ChoiceWriter, CompletionFormat, CompletionWriter
from trencadis_server.protocol.completions import CompletionRequest

PROMPT = (261, 282)


def entry(position: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(index=0, position=position, token_id=token, logprob=-1.0, rank=1)


def after(tokenizer: Tokenizer, num_tokens: int, *, is_finished: bool = False, num_scored: int = 1) -> RequestOutput:
    tokens = tuple(range(300, 300 + num_tokens))
    one = CompletionOutput(
        index=0,
        text=tokenizer.decode(tokens),
        token_ids=tokens,
        finish_reason=FinishReason.LENGTH if is_finished else None,
        logprobs=tuple(entry(2 + i, token) for i, token in enumerate(tokens)),
    )
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=PROMPT,
        outputs=(one,),
        finished=is_finished,
        prompt_logprobs=tuple(entry(1 + i, token) for i, token in enumerate(PROMPT[1 : 1 + num_scored])),
    )


def taken(writer: ChoiceWriter, output: RequestOutput) -> Any:
    return writer.take(output, output.outputs[0])


def test_pieces_are_together_what_one_piece_is(tokenizer: Tokenizer) -> None:
    wanted = CompletionFormat(tokenizer=tokenizer, has_logprobs=True, has_token_ids=True)
    whole = taken(ChoiceWriter(wanted, index=3, echo="he said"), after(tokenizer, 6, is_finished=True))
    writer = ChoiceWriter(wanted, index=3, echo="he said")
    pieces = [taken(writer, after(tokenizer, count)) for count in range(1, 6)]
    pieces.append(taken(writer, after(tokenizer, 6, is_finished=True)))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [one for piece in pieces for one in piece.logprobs.tokens] == whole.logprobs.tokens
    assert [one for piece in pieces for one in piece.logprobs.text_offset] == whole.logprobs.text_offset
    assert [piece.finish_reason for piece in pieces] == [None] * 5 + ["length"]
    assert (pieces[0].prompt_token_ids, pieces[1].prompt_token_ids) == (list(PROMPT), UNSET)
    assert {piece.index for piece in pieces} == {3}


def test_no_news_is_no_chunk_and_nothing_follows_the_end(tokenizer: Tokenizer) -> None:
    writer = ChoiceWriter(CompletionFormat(tokenizer=tokenizer), index=0, echo=None)
    assert taken(writer, after(tokenizer, 1)) is not None
    assert taken(writer, after(tokenizer, 1)) is None
    assert taken(writer, after(tokenizer, 1, is_finished=True)).finish_reason == "length"
    assert taken(writer, after(tokenizer, 1, is_finished=True)) is None


def test_an_echo_waits_for_the_log_probabilities_of_the_whole_prompt(tokenizer: Tokenizer) -> None:
    wanted = CompletionFormat(tokenizer=tokenizer, has_logprobs=True)
    writer = ChoiceWriter(wanted, index=0, echo="he")
    assert taken(writer, after(tokenizer, 1, num_scored=0)) is None
    piece = taken(writer, after(tokenizer, 2))
    assert len(piece.logprobs.tokens) == len(PROMPT) + 2


def test_without_output_the_prompt_alone_is_written(tokenizer: Tokenizer) -> None:
    wanted = CompletionFormat(tokenizer=tokenizer, has_output=False, has_logprobs=True, has_token_ids=True)
    output = after(tokenizer, 1, is_finished=True)
    stopped = msgspec.structs.replace(output.outputs[0], finish_reason=FinishReason.STOP, stop_reason=5)
    piece = ChoiceWriter(wanted, index=0, echo="hell").take(output, stopped)
    assert piece is not None
    assert (piece.text, piece.token_ids, piece.finish_reason, piece.stop_reason) == ("hell", [], "length", None)
    assert piece.logprobs is not None
    assert len(piece.logprobs.tokens) == len(PROMPT)


def test_log_probabilities_of_a_prompt_are_written_once_for_all_its_choices(tokenizer: Tokenizer) -> None:
    def whole(num_choices: int) -> Any:
        output = after(tokenizer, 1, is_finished=True)
        choices = tuple(msgspec.structs.replace(output.outputs[0], index=index) for index in range(num_choices))
        writer = CompletionWriter(
            answer_id="cmpl-1",
            created=3,
            model="m",
            fingerprint="fp_1",
            tokenizer=tokenizer,
            body=CompletionRequest(model="m", prompt=list(PROMPT), logprobs=1, prompt_logprobs=1),
            echoes=[tokenizer.decode(PROMPT)],
        )
        return writer.whole([msgspec.structs.replace(output, outputs=choices)]).choices

    (alone,), (first, second) = whole(1), whole(2)
    assert second.prompt_logprobs is first.prompt_logprobs
    assert second.logprobs.top_logprobs[1] is first.logprobs.top_logprobs[1]
    written = [msgspec.json.encode(msgspec.structs.replace(one, index=0)) for one in (alone, first, second)]
    assert written[0] == written[1] == written[2]
