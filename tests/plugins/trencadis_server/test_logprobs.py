from __future__ import annotations

import gc
import math
from typing import Any

import msgspec
import pytest

from support.tokenizer_zoo import zoo_tokenizer
from trencadis.records import TokenLogprobs
from trencadis.text import Tokenizer
from trencadis_server.generation.logprobs import (
    CompletionLogprobsWriter,
    chat_logprobs,
    prompt_logprobs,
    token_text,
)
from trencadis_server.protocol.answers import PromptLogprob
from trencadis_server.protocol.chat import ChatLogprobs

TEXT = "a € b"


def entries(tokens: tuple[int, ...], *, num_top: int = 0) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            index=0,
            position=position,
            token_id=token,
            logprob=-0.5,
            rank=4,
            top_token_ids=tuple(range(70, 70 + num_top)),
            top_logprobs=tuple(-0.1 * i for i in range(num_top)),
        )
        for position, token in enumerate(tokens)
    ]


def as_sent(value: Any, kind: Any) -> Any:
    """Return what a client reads of a value."""
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)


@pytest.mark.parametrize(
    ("data", "prefix", "text"),
    [
        (b"abc", "bytes:", "abc"),
        ("€".encode(), "", "€"),
        (b"\xe2\x82", "", r"\xe2\x82"),
        (b"\xe2", "bytes:", r"bytes:\xe2"),
        (b"", "", ""),
    ],
)
def test_bytes_that_are_no_text_are_written_in_hexadecimal(data: bytes, prefix: str, text: str) -> None:
    assert token_text(data, prefix=prefix) == text


def test_chat_logprobs_have_the_exact_bytes_of_each_token(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    content = as_sent(chat_logprobs(entries(tokens, num_top=2), tokenizer), ChatLogprobs).content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == TEXT
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[0.0, -0.1]] * len(tokens)
    assert all(entry.token == token_text(bytes(entry.bytes)) for entry in content)


def test_minus_infinity_is_a_number_that_json_has(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(
        index=0,
        position=0,
        token_id=80,
        logprob=-math.inf,
        rank=9,
        top_token_ids=(81,),
        top_logprobs=(-math.inf,),
    )
    (written,) = as_sent(chat_logprobs([entry], tokenizer), ChatLogprobs).content
    assert (written.logprob, written.top_logprobs[0].logprob) == (-9999.0, -9999.0)


def test_prompt_logprobs_are_by_token_id_with_ranks_and_null_first(tokenizer: Tokenizer) -> None:
    kind = list[dict[str, PromptLogprob] | None]
    first, second = as_sent(prompt_logprobs(entries((80,), num_top=2), tokenizer), kind)
    assert first is None
    assert {token: (one.rank, one.logprob) for token, one in second.items()} == {
        "70": (1, 0.0),
        "71": (2, -0.1),
        "80": (4, -0.5),
    }
    assert second["80"].decoded_token == tokenizer.decode([80])


def test_offsets_are_where_tokens_begin_in_the_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    written = CompletionLogprobsWriter(tokenizer).output(entries(tokens))
    # The three bytes of the euro sign are tokens of their own here: the character is complete with the third.
    euro = [token_text(bytes([byte]), prefix="bytes:") for byte in "€".encode()]
    at = dict(zip(written.tokens, written.text_offset, strict=True))
    assert [at[name] for name in euro] == [2, 2, 2]
    assert at[" b"] == TEXT.index(" b")


def test_hidden_tokens_take_no_room_in_the_text(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_token_ids)
    (letter,) = tokenizer.encode("a")
    writer = CompletionLogprobsWriter(tokenizer, hides_special=True)
    assert writer.output(entries((special, letter, letter))).text_offset == [0, 0, 1]


def test_an_entry_is_encoded_when_it_is_made_and_leaves_no_objects(tokenizer: Tokenizer) -> None:
    num_before = len(gc.get_objects())
    written = [
        chat_logprobs(entries((80,) * 500, num_top=50), tokenizer),
        prompt_logprobs(entries((80,) * 500, num_top=50), tokenizer),
        CompletionLogprobsWriter(tokenizer).output(entries((80,) * 500, num_top=50)),
    ]
    num_kept = len(gc.get_objects()) - num_before
    assert num_kept < 10_000, f"{num_kept} objects for 75,000 candidates"
    assert len(msgspec.json.encode(written)) > 75_000


def test_tokens_that_share_a_text_are_all_among_the_alternatives() -> None:
    tokenizer = zoo_tokenizer("llama2")
    assert tokenizer.byte_fallback is not None
    byte = next(token for token, value in tokenizer.byte_fallback.byte_of.items() if value == ord("!"))
    letter = tokenizer.encode("a!", add_special_tokens=False)[-1]
    assert tokenizer.token_bytes(byte) == tokenizer.token_bytes(letter) == b"!"

    def written(chosen: int, tops: tuple[int, ...]) -> Any:
        entry = TokenLogprobs(
            index=0,
            position=0,
            token_id=chosen,
            logprob=-0.5 - tops.index(chosen) if chosen in tops else -9.0,
            rank=1,
            top_token_ids=tops,
            top_logprobs=tuple(-0.5 - i for i in range(len(tops))),
        )
        return as_sent(CompletionLogprobsWriter(tokenizer).output([entry]).top_logprobs[0], dict[str, float])

    (comma,) = tokenizer.encode(",", add_special_tokens=False)[-1:]
    assert written(letter, (letter, byte)) == {"!": -0.5, f"token_id:{byte}": -1.5}
    assert written(letter, (byte, letter)) == {f"token_id:{byte}": -0.5, "!": -1.5}
    assert written(comma, (byte, letter)) == {"!": -0.5, f"token_id:{letter}": -1.5, ",": -9.0}
    assert written(letter, (byte,)) == {f"token_id:{byte}": -0.5, "!": -9.0}
