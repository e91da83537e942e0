from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.tokenizer_zoo import SPECIAL_TEXTS, TEXTS, ZOO, over_the_zoo, zoo_tokenizer
from trencadis.text.detokenizer import Detokenizer
from trencadis.text.stop import StopChecker
from trencadis.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = Path(__file__).parents[4] / "shared" / "data" / "corpus"
BAD = "\N{REPLACEMENT CHARACTER}"
WITH_BYTE_TOKENS = [name for name, entry in ZOO.items() if entry.has_byte_fallback]
with_byte_tokens = pytest.mark.parametrize("name", WITH_BYTE_TOKENS)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    # Low ids are special tokens and single bytes: the hard cases, so they come up often. Some ids are no token's.
    return st.lists(st.one_of(st.integers(0, 270), st.integers(0, tokenizer.vocab_size + 8)), max_size=80)


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    assert tokenizer.byte_fallback is not None
    token_of = {byte: token_id for token_id, byte in tokenizer.byte_fallback.byte_of.items()}
    return [token_of[byte] for byte in data]


def piece(tokenizer: Tokenizer, token: str) -> int:
    return int(tokenizer._hf.convert_tokens_to_ids(token))


def deltas_of(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    deltas, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.add(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*deltas, detokenizer.flush()]


@over_the_zoo
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_deltas_of_random_tokens_are_the_text_in_one_piece(
    name: str, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    tokenizer = zoo_tokenizer(name)
    ids = data.draw(ids_of(tokenizer))
    whole, text = tokenizer.decode(ids, skip_special_tokens=skip), ""
    for delta in deltas_of(Detokenizer(tokenizer, skip_special_tokens=skip), ids, sizes):
        text += delta
        assert whole.startswith(text), "no delta is changed by later tokens"
    assert text == whole


@over_the_zoo
@given(data=st.data())
def test_text_continues_its_prompt(name: str, data: st.DataObject) -> None:
    tokenizer = zoo_tokenizer(name)
    ids, prompt = data.draw(ids_of(tokenizer)), tokenizer.encode("abc hello world", add_special_tokens=False)
    deltas = deltas_of(Detokenizer(tokenizer, prompt_token_ids=prompt), ids)
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    assert tokenizer.decode(prompt) + "".join(deltas) == whole


@pytest.mark.filterwarnings("ignore:This sequence already has")  # ByT5, of a text that ends with its </s>
@over_the_zoo
def test_text_in_two_parts_at_every_split_is_what_the_tokenizer_itself_decodes(name: str) -> None:
    tokenizer = zoo_tokenizer(name)
    for text in (TEXTS | SPECIAL_TEXTS).values():
        ids = tokenizer.encode(text)
        own = tokenizer._hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == own
        for split in range(len(ids) + 1):
            detokenizer = Detokenizer(tokenizer)
            deltas = [detokenizer.add(ids[:split]), detokenizer.add(ids[split:]), detokenizer.flush()]
            assert "".join(deltas) == own


@over_the_zoo
def test_no_delta_of_well_formed_text_has_half_a_character(name: str) -> None:
    tokenizer = zoo_tokenizer(name)
    for text in ZOO[name].texts.values():
        deltas = deltas_of(Detokenizer(tokenizer), tokenizer.encode(text))
        assert "".join(deltas) == text
        assert {character for delta in deltas for character in delta} <= set(text)


@over_the_zoo
def test_text_of_more_tokens_than_are_decoded_again_is_whole(name: str) -> None:
    tokenizer, dice = zoo_tokenizer(name), random.Random(0)
    texts = list((TEXTS | SPECIAL_TEXTS).values())
    ids = tokenizer.encode("".join(dice.choices(texts, k=60)))
    sizes = [dice.randint(1, 9) for _ in range(50)]
    assert "".join(deltas_of(Detokenizer(tokenizer), ids, sizes)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_multilingual_and_naughty_strings_survive(name: str) -> None:
    if not CORPUS.is_dir():
        pytest.skip(f"no corpus in {CORPUS}")
    lines = (CORPUS / "tokenizer_multilingual.txt").read_text(encoding="utf-8").splitlines()
    lines += json.loads((CORPUS / "tokenizer_naughty_strings.json").read_text(encoding="utf-8"))
    tokenizer, dice = zoo_tokenizer(name), random.Random(0)
    for line in filter(None, lines):
        ids = tokenizer.encode(line)
        deltas = deltas_of(Detokenizer(tokenizer), ids, [dice.randint(1, 3)])
        assert "".join(deltas) == tokenizer._hf.decode(ids, skip_special_tokens=True)


@with_byte_tokens
def test_a_character_that_is_cut_off_destroys_none_before_it(name: str) -> None:
    tokenizer = zoo_tokenizer(name)
    ids = byte_tokens(tokenizer, "😀😁😂".encode()[:6])
    assert tokenizer.decode(ids) == "😀" + BAD
    assert deltas_of(Detokenizer(tokenizer), ids) == ["", "", "", "😀", "", "", BAD]


@with_byte_tokens
def test_text_of_byte_tokens_is_streamed_and_stops_within_their_run(name: str) -> None:
    tokenizer = zoo_tokenizer(name)
    detokenizer, stops = Detokenizer(tokenizer), StopChecker(["界!"])
    text = ""
    for read, token in enumerate(byte_tokens(tokenizer, "世界! and much more".encode()), start=1):
        text += stops.feed(detokenizer.add([token]))
        if stops.matched:
            break
    assert (text, stops.matched, read) == ("世", "界!", len("世界!".encode()))


@with_byte_tokens
@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("C0 AF E0 80 BF F0 81 82 41", 8 * BAD + "A"),
        ("ED A0 80 ED BF BF ED AF 41", 8 * BAD + "A"),
        ("F4 91 92 93 FF 41 80 BF 42", 5 * BAD + "A" + 2 * BAD + "B"),
        ("E1 80 E2 F0 91 92 F1 BF 41", 4 * BAD + "A"),
    ],
)
def test_bytes_that_fit_nowhere_are_replaced_as_the_unicode_standard_says(name: str, data: str, text: str) -> None:
    """Source: The Unicode Standard 15, tables 3-8 to 3-11."""
    tokenizer = zoo_tokenizer(name)
    ids = byte_tokens(tokenizer, bytes.fromhex(data))
    assert tokenizer.decode(ids) == text
    assert "".join(deltas_of(Detokenizer(tokenizer), ids)) == text


@with_byte_tokens
@given(data=st.lists(st.one_of(st.binary(max_size=6), st.sampled_from(["▁hello", "he", "é", "😀"])), max_size=12))
@example(data=["▁hello", "€".encode()[:2], "he", b"\xa9", "é"])
def test_runs_of_any_bytes_are_what_the_tokenizer_decodes_of_their_valid_form(
    name: str, data: list[bytes | str]
) -> None:
    tokenizer = zoo_tokenizer(name)
    ids: list[int] = []
    valid: list[int] = []
    for is_run, parts in itertools.groupby(data, key=lambda part: isinstance(part, bytes)):
        if is_run:
            run = b"".join(part for part in parts if isinstance(part, bytes))
            ids += byte_tokens(tokenizer, run)
            valid += byte_tokens(tokenizer, run.decode("utf-8", "replace").encode())
        else:
            pieces = [piece(tokenizer, str(part)) for part in parts]
            ids, valid = ids + pieces, valid + pieces
    assert tokenizer.decode(ids) == tokenizer._hf.decode(valid)
    assert "".join(deltas_of(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids)


@over_the_zoo
def test_ids_that_the_tokenizer_does_not_know_have_no_text(name: str) -> None:
    tokenizer = zoo_tokenizer(name)
    ids = tokenizer.encode("abc hello")
    unknown = [i for i in range(tokenizer.vocab_size * 3 + 9) if not tokenizer.knows(i)]
    assert unknown
    mixed = [unknown[0], *ids, *unknown, *ids]
    assert tokenizer.decode(unknown) == ""
    assert tokenizer.decode(mixed) == tokenizer.decode([*ids, *ids])
    assert "".join(deltas_of(Detokenizer(tokenizer, skip_special_tokens=False), mixed)) == tokenizer.decode(mixed)


@with_byte_tokens
def test_tokens_without_text_do_not_end_a_run_of_bytes(name: str) -> None:
    tokenizer = zoo_tokenizer(name)
    first, last = byte_tokens(tokenizer, "é".encode())
    ids = [first, tokenizer.vocab_size + 5, piece(tokenizer, "</s>"), last]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "é"
    assert tokenizer.decode(ids) == BAD + "</s>" + BAD
    for skip in (True, False):
        deltas = deltas_of(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["demo", "llama2", "unigram_bytes"])
@pytest.mark.parametrize("garbage", [True, False])
def test_a_token_costs_the_same_however_long_the_text_is(name: str, garbage: bool) -> None:
    tokenizer = load_tokenizer("demo") if name == "demo" else zoo_tokenizer(name)
    num_decoded = 0

    class Counted:
        special_token_ids = tokenizer.special_token_ids
        byte_fallback = tokenizer.byte_fallback
        byte_table = None
        next_token = tokenizer.next_token
        knows = staticmethod(tokenizer.knows)

        def decode_certain(self, ids: list[int]) -> str:
            nonlocal num_decoded
            num_decoded += len(ids)
            return tokenizer.decode_certain(ids)

    ids = list(tokenizer.encode("hello world lo! " * 400))[:3000]
    if garbage:
        # A byte that can stand nowhere in UTF-8.
        ids = [next(i for i in range(4096) if tokenizer.token_bytes(i) == b"\xff")] * 3000
    deltas_of(Detokenizer(Counted()), ids)  # type: ignore[arg-type]
    assert num_decoded <= 40 * len(ids)


def test_special_tokens_are_text_only_if_asked_for() -> None:
    tokenizer = load_tokenizer("demo")
    ids = [*tokenizer.encode("one"), 0, *tokenizer.encode(" two")]
    assert "".join(deltas_of(Detokenizer(tokenizer), ids)) == "one two"
    assert "".join(deltas_of(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "one<|end|> two"
