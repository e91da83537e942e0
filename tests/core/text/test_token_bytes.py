from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trencadis.text.token_bytes import TokenBytes
from trencadis.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = Path(__file__).parents[4] / "shared" / "data" / "corpus"
BYTE_LEVEL = load_tokenizer("demo")


def made_of(rust: RustTokenizer) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


def byte_fallback() -> Tokenizer:
    """Words with a sign for the space, and a token for each byte that no word has; nothing is put in front of a text."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi", "<0x41"]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [("h", "i"), ("▁", "hi")]
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made_of(rust)


def word_piece() -> Tokenizer:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "a": 3, ".": 4, "not": 5}
    rust = RustTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    rust.add_special_tokens(["[CLS]"])
    return made_of(rust)


def joined(tokenizer: Tokenizer, text: str) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))


@settings(max_examples=200, phases=(Phase.explicit, Phase.generate))
@given(text=st.text(min_size=1))
def test_bytes_of_the_tokens_of_a_text_are_the_bytes_of_the_text(text: str) -> None:
    assert joined(BYTE_LEVEL, text) == text.encode()


def test_hard_texts_come_back_byte_for_byte() -> None:
    if not CORPUS.is_dir():
        pytest.skip(f"no corpus in {CORPUS}")
    lines = (CORPUS / "tokenizer_multilingual.txt").read_text(encoding="utf-8").splitlines()
    lines += json.loads((CORPUS / "tokenizer_naughty_strings.json").read_text(encoding="utf-8"))
    for line in filter(None, lines):
        assert joined(BYTE_LEVEL, line) == line.encode()


def test_every_byte_of_a_byte_level_vocabulary_is_one_token_and_no_other() -> None:
    singles = [BYTE_LEVEL.token_bytes(i) for i in range(BYTE_LEVEL.vocab_size) if i not in BYTE_LEVEL.special_token_ids]
    assert sorted(one for one in singles if len(one) == 1) == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("text", [" hi hi", "hi", "naïve 你好 😀 hi", "A"])
def test_byte_fallback_gives_bytes_of_characters_without_a_token(text: str) -> None:
    assert joined(byte_fallback(), text) == text.encode()


def test_only_whole_byte_signs_stand_for_bytes() -> None:
    tokenizer = byte_fallback()
    assert tokenizer.token_bytes(1 + 0xE4) == b"\xe4"
    assert tokenizer.token_bytes(1 + 256 + 5) == b"<0x41"


def test_byte_signs_are_plain_text_to_a_tokenizer_without_byte_fallback() -> None:
    rust = RustTokenizer(models.WordLevel({"<0x41>": 0, "▁a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    rust.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer = made_of(rust)
    assert [tokenizer.token_bytes(i) for i in (0, 1)] == [b"<0x41>", b" a"]


def test_a_word_brings_the_space_before_it_and_its_continuation_does_not() -> None:
    tokenizer = word_piece()
    assert [tokenizer.token_bytes(i) for i in (1, 2, 4)] == [b" play", b"ing", b"."]


def test_special_tokens_have_the_bytes_they_are_written_with(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(0) == b"<|end|>"
    assert word_piece().token_bytes(6) == b"[CLS]"


@pytest.mark.parametrize("token_id", [-1, 4096, 99_999])
def test_unknown_ids_have_no_bytes(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.token_bytes(token_id) == b""


def test_a_tokenizer_without_a_rust_half_is_asked_for_each_token() -> None:
    class Slow:
        """What transformers offers of a tokenizer in Python: no backend, ids and tokens."""

        tokens = ("<0xC3>", "<0xA9>", "▁oak", "a")

        def __len__(self) -> int:
            return len(self.tokens)

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [self.tokens.index(text)]

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return self.tokens[token_id]

        def decode(self, ids: list[int], **options: bool) -> str:
            return "".join(self.tokens[i] for i in ids).replace("▁", " ")

    token_bytes = TokenBytes(Slow())
    assert [token_bytes(i) for i in range(5)] == [b"\xc3", b"\xa9", b" oak", b"a", b""]
