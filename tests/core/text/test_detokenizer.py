from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from trencadis.text.detokenizer import Detokenizer
from trencadis.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = Path(__file__).parents[4] / "shared" / "data" / "corpus"
WORDS = ["▁", "▁▁", "▁hello", "lo", "▁world", "!", "é", "\N{REPLACEMENT CHARACTER}", "▁你好"]


def byte_fallback() -> Tokenizer:
    """A tokenizer in the manner of SentencePiece: words, and a token for each byte that no word has."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: index for index, name in enumerate(names)}
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(steps)
    rust.add_special_tokens(["</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>"))


TOKENIZERS = {"byte_level": load_tokenizer("demo"), "byte_fallback": byte_fallback()}


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    size = TOKENIZERS[kind].vocab_size
    # Low ids are special tokens and single bytes: the hard cases, so they come up often.
    return st.lists(st.one_of(st.integers(0, 270), st.integers(0, size - 1)), max_size=80)


def deltas_of(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    deltas, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.add(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_deltas_of_random_tokens_are_the_text_in_one_piece(
    kind: str, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    tokenizer, ids = TOKENIZERS[kind], data.draw(ids_of(kind))
    deltas = deltas_of(Detokenizer(tokenizer, skip_special_tokens=skip), ids, sizes)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_no_delta_is_changed_by_later_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer, ids = TOKENIZERS[kind], data.draw(ids_of(kind))
    detokenizer, text = Detokenizer(tokenizer), ""
    full = tokenizer.decode(ids, skip_special_tokens=True)
    for token in ids:
        text += detokenizer.add([token])
        assert full.startswith(text)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_text_continues_its_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer, ids = TOKENIZERS[kind], data.draw(ids_of(kind))
    words = [258 + WORDS.index(word) for word in ("▁hello", "lo", "▁world", "!")]
    prompt = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=12))
    deltas = deltas_of(Detokenizer(tokenizer, prompt_token_ids=prompt), ids)
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    assert tokenizer.decode(prompt) + "".join(deltas) == whole


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    "text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 family", "עברית و عربى", "a\N{REPLACEMENT CHARACTER}b"]
)
def test_no_delta_of_well_formed_text_has_half_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    deltas = deltas_of(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    for character in {character for delta in deltas for character in delta}:
        assert character in text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_multilingual_and_naughty_strings_survive(kind: str) -> None:
    if not CORPUS.is_dir():
        pytest.skip(f"no corpus in {CORPUS}")
    lines = (CORPUS / "tokenizer_multilingual.txt").read_text(encoding="utf-8").splitlines()
    lines += json.loads((CORPUS / "tokenizer_naughty_strings.json").read_text(encoding="utf-8"))
    tokenizer, dice = TOKENIZERS[kind], random.Random(0)
    for line in filter(None, lines):
        ids = tokenizer.encode(line)
        deltas = deltas_of(Detokenizer(tokenizer), ids, [dice.randint(1, 3)])
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_run_of_bytes_waits_for_its_end_because_one_wrong_byte_would_change_all_of_it() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    good = [2 + byte for byte in "你".encode()]
    bad = 2 + 0xFF
    assert tokenizer.decode(good) == "你"
    assert tokenizer.decode([*good, bad]) == "\N{REPLACEMENT CHARACTER}" * 4
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(good) == ""
    assert detokenizer.add([2 + 256 + WORDS.index("lo")]) == "你lo"


def test_a_token_that_the_tokenizer_does_not_know_does_not_end_a_run_of_bytes() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [2 + 0xC2, 2 + 0x80, tokenizer.vocab_size, 2 + 0x80]
    assert "".join(deltas_of(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("garbage", [True, False])
def test_a_token_costs_the_same_however_long_the_text_is(kind: str, garbage: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    num_decoded = 0

    class Counted:
        special_token_ids = tokenizer.special_token_ids
        byte_token_ids = tokenizer.byte_token_ids
        byte_table = None
        knows = staticmethod(tokenizer.knows)

        def decode(self, ids: Sequence[int]) -> str:
            nonlocal num_decoded
            num_decoded += len(ids)
            return tokenizer.decode(ids)

    ids = [2 + 0xFF] * 3000 if garbage else list(tokenizer.encode("hello world lo! " * 400))[:3000]
    if garbage and kind == "byte_level":
        # A byte that can stand nowhere in UTF-8: each one looks like the start of a character that may yet come.
        ids = [next(i for i in range(4096) if tokenizer.decode([i]) == "\N{REPLACEMENT CHARACTER}")] * 3000
    deltas_of(Detokenizer(Counted()), ids)  # type: ignore[arg-type]
    assert num_decoded <= 40 * len(ids)


def test_special_tokens_are_text_only_if_asked_for() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [*tokenizer.encode("one"), 0, *tokenizer.encode(" two")]
    assert "".join(deltas_of(Detokenizer(tokenizer), ids)) == "one two"
    assert "".join(deltas_of(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "one<|end|> two"
