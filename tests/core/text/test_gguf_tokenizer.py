"""Tokenizers of .gguf files: against those that transformers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.gguf_writing import write_gguf
from trencadis.errors import ModelLoadError
from trencadis.text import load_tokenizer
from trencadis.text.gguf_tokenizer import load_gguf_tokenizer

pytest.importorskip("gguf")
pytest.importorskip("torch")

TEXTS = ("the heath", " the  heath\n\nthe", "<bos>the", "ünï the\t", "", "   ")
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn>", "<think>"]
KINDS = [3, 3, 3, 2, 3, 3, 4]
PIECES = [
    "\n",
    "\n\n",
    "  ",
    "   ",
    "t",
    "h",
    "e",
    "a",
    "\u2581",
    "he",
    "th",
    "the",
    "\u2581the",
    "ea",
    "hea",
    "heat",
    "heath",
    "eath",
]
SIZES = {".context_length": 64, ".embedding_length": 32, ".block_count": 1, ".attention.head_count": 4}


def sentencepiece(**more: Any) -> dict[str, Any]:
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
    return SIZES | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": KINDS + [6] * 256 + [4, 4, 4, 4] + [1] * (len(PIECES) - 4),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        **more,
    }


def bytewise(pre: str) -> dict[str, Any]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merges = ["h e", "t he", "Ġ the", "e a", "t h"]
    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges), "<|end|>"]
    return SIZES | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


@pytest.mark.representatives(4, ci=5)
@pytest.mark.parametrize(
    ("architecture", "metadata"),
    [
        pytest.param("gemma3", sentencepiece(), id="gemma"),
        pytest.param("llama", sentencepiece(), id="llama"),
        pytest.param("phi3", sentencepiece(), id="phi"),
        pytest.param("qwen2", bytewise("qwen2"), id="qwen"),
        pytest.param("llama", bytewise("llama-bpe"), id="llama-bpe"),
    ],
)
def test_a_tokenizer_is_that_of_transformers(tmp_path: Path, architecture: str, metadata: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "a.gguf", architecture, metadata=metadata)
    found = load_gguf_tokenizer(path)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf", local_files_only=True)
    model, reference = (json.loads(one.backend_tokenizer.to_str()) for one in (found, expected))
    for part in ("model", "normalizer", "pre_tokenizer", "decoder"):
        assert model[part] == reference[part], part
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if f"tokenizer.ggml.{name}_id" in metadata:
            assert getattr(found, name) == getattr(expected, name)
    for text in TEXTS:
        ids = found(text)["input_ids"]
        assert ids == expected(text)["input_ids"], text
        assert found.decode(ids) == expected.decode(ids)


def test_merges_that_gemma_lacks_are_found(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "a.gguf", "gemma3", metadata=sentencepiece())))
    tokens = sentencepiece()["tokenizer.ggml.tokens"]
    assert tokenizer.encode("the heath") == (2, tokens.index("the"), tokens.index("\u2581"), tokens.index("heath"))
    assert tokenizer.decode(tokenizer.encode("the   heath"), skip_special_tokens=True) == "the   heath"


def test_the_beginning_is_added_as_the_file_says(tmp_path: Path) -> None:
    for added in (True, False):
        metadata = sentencepiece(**{"tokenizer.ggml.add_bos_token": added})
        tokenizer = load_tokenizer(str(write_gguf(tmp_path / f"{added}.gguf", "gemma3", metadata=metadata)))
        assert (tokenizer.encode("the")[0] == 2) is added
        assert tokenizer.opening == (2,)


def test_chat_templates_are_read_with_their_names(tmp_path: Path) -> None:
    one = {"tokenizer.chat_template": "plain"}
    several = one | {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]}
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "a.gguf", "gemma3", metadata=sentencepiece(**one))))
    assert tokenizer.find_template(has_tools=True) == "plain"
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "b.gguf", "gemma3", metadata=sentencepiece(**several))))
    assert tokenizer.find_template() == "plain"
    assert tokenizer.find_template(has_tools=True) == "tools"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999, and there are 281 tokens"),
        ({"tokenizer.ggml.model": "rwkv"}, "of the kind 'rwkv'; known are "),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", "gemma3", metadata=sentencepiece(**changed))
    with pytest.raises(ModelLoadError, match=words):
        load_tokenizer(str(path))


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="the file holds no tokenizer"):
        load_tokenizer(str(write_gguf(tmp_path / "a.gguf", "gemma3", metadata=SIZES)))
