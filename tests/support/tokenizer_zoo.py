"""A zoo of tokenizers: one of each kind that transformers reads, made in memory within milliseconds.

Each entry of :data:`ZOO` writes the files of a published checkpoint (``tokenizer.json``, ``tokenizer_config.json``, and ``config.json`` of a
tiny Llama without weights), so that a test loads it as an engine does::

    @over_the_zoo
    def test_something(name: str) -> None:
        tokenizer = zoo_tokenizer(name)
        assert tokenizer.decode(...) == ...

The vocabularies are small: a few merges of Latin, and no token for most other characters, so that each kind shows what it does with them.
``LARGE`` has what takes seconds.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from trencadis.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["LARGE", "SPECIAL_TEXTS", "TEXTS", "ZOO", "ZooTokenizer", "over_the_zoo", "zoo_tokenizer"]

TEXTS = {
    "letters": "abc",
    "words": "Hello world, the old man said: it's 1234.5!",
    "json": '{"name": "Ann", "age": 3, "ok": true}',
    "leading_space": " abc hello",
    "leading_spaces": "   abc",
    "trailing_space": "abc ",
    "spaces_inside": "a  b   c",
    "newlines": "one\n\ntwo\r\n\tthree\n",
    "accents": "naïve café Ünïcödé",
    "combining": "e\u0301le\u0300ve",
    "compatibility": "ﬁne ① Ａ½",
    "cjk": "日本語のテキスト 你好",
    "emoji": "😀😁😂",
    "emoji_joined": "👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "right_to_left": "עברית و عربى",
    "replacement": "a\N{REPLACEMENT CHARACTER}b",
    "sign_of_space": "a▁b",
    "byte_sign": "a<0x41>b",
    "control": "a\x00b\x1fc\x7f",
    "upper": "ABC abc Abc",
}
"""Valid texts without special tokens, none of them empty."""

SPECIAL_TEXTS = {
    "between": "one<s>two</s> three",
    "spaces": "one <s> two </s>  three",
    "only": "</s>",
    "added": "call <tool> now <tool>x</tool> end",
    "user": "<|user|>\nHello<|end|>\n<|assistant|>\n",
}
"""Texts in which special and added tokens of some of the tokenizers are spelled."""

_SPECIAL = ("<unk>", "<s>", "</s>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_CORPUS = (*TEXTS.values(), "the man, the woman and the child; there is the other one. " * 4, "hello world abc " * 8)


@dataclass(frozen=True)
class ZooTokenizer:
    """One kind of tokenizer.

    Args:
        name: The key in :data:`ZOO`.
        files: Returns the content of each file by name.
        is_byte_level: All tokens are bytes, and a text is these bytes read as UTF-8.
        has_byte_fallback: It has ``<0xNN>`` tokens for characters without a token.
        loses: Keys of the :data:`TEXTS` that do not come back from encode and decode with special tokens skipped; None: most of them.
        num_ids: One more than the highest token id of a tokenizer that is written in Python; 0: ``tokenizer.json`` says it.
        num_padding_ids: Ids of the model, in ``config.json``, beyond the last token; negative: the model has fewer than the tokenizer.
    """

    name: str
    files: Callable[[], Mapping[str, str]]
    is_byte_level: bool = False
    has_byte_fallback: bool = False
    loses: tuple[str, ...] | None = ()
    num_ids: int = 0
    num_padding_ids: int = 0

    @property
    def is_slow(self) -> bool:
        """True if it is written in Python."""
        return bool(self.num_ids)

    @property
    def texts(self) -> dict[str, str]:
        """Those of :data:`TEXTS` that come back."""
        return {} if self.loses is None else {key: text for key, text in TEXTS.items() if key not in self.loses}

    def make(self, directory: Path) -> str:
        """Write the files and return the directory as ``model.path`` has it."""
        directory.mkdir(parents=True, exist_ok=True)
        files = dict(self.files())
        num_ids = self.num_ids or _num_ids(files["tokenizer.json"])
        files["config.json"] = json.dumps({**_CONFIG, "vocab_size": num_ids + self.num_padding_ids})
        for name, content in files.items():
            (directory / name).write_text(content, encoding="utf-8")
        return str(directory)


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


_Test = TypeVar("_Test", bound=Callable[..., object])


def over_the_zoo(test: _Test) -> _Test:
    """Run a test with the name of each entry of :data:`ZOO`, in each tier of tests: each is another kind, not a repetition."""
    everywhere = pytest.mark.representatives(len(ZOO))(test)
    return pytest.mark.parametrize("name", ZOO)(everywhere)


@functools.cache
def zoo_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of an entry as an engine loads it; once per process."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as directory:
        return load_tokenizer((ZOO | LARGE)[name].make(Path(directory)))


# ------------------------------------------------------------------------------------------------------------------- byte level


@functools.cache
def _byte_level_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator(_CORPUS, trainer)
    return _parts(rust)


def _byte_level(
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    add_prefix_space: bool = False,
    added: tuple[AddedToken, ...] = (),
    writes_bos: bool = True,
    id_step: int = 1,
    **settings: Any,
) -> dict[str, str]:
    """Files in the manner of GPT-2, Llama 3 and Qwen."""
    vocabulary, merges = _byte_level_vocabulary()
    rust = RustTokenizer(models.BPE(vocab={token: i * id_step for token, i in vocabulary.items()}, merges=merges))
    if normalizer is not None:
        rust.normalizer = normalizer
    rust.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    rust.decoder = decoders.ByteLevel()
    _add(rust, ("<s>", "</s>"), added)
    if writes_bos:
        rust.post_processor = _bos(rust)
    return _files(rust, bos_token="<s>", eos_token="</s>", **settings)


def _split_then_bytes() -> Any:
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone])


# -------------------------------------------------------------------------------------------------------- in SentencePiece's manner


@functools.cache
def _sentence_piece_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Special tokens, 256 bytes, then words and characters of the corpus that are ASCII; merges in their order."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    rust.train_from_iterator([text for text in _CORPUS if text.isascii() and text.isprintable()], trainer)
    vocabulary, merges = _parts(rust)
    known = sorted(vocabulary, key=vocabulary.__getitem__)
    names = [*_SPECIAL, *_BYTES, *(token for token in known if token not in _SPECIAL), "é", "▁▁", "你", "😀"]
    return {token: i for i, token in enumerate(names)}, [*merges, ("▁", "▁")]


def _sentence_piece(
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    strips: bool = True,
    added: tuple[AddedToken, ...] = (),
    **settings: Any,
) -> dict[str, str]:
    """Files in the structure of Llama 2's: BPE with byte fallback, its space a sign that the normaliser or the pre-tokenizer writes."""
    vocabulary, merges = _sentence_piece_vocabulary()
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    rust = RustTokenizer(model)
    if normalizer is not None:
        rust.normalizer = normalizer
    if pre_tokenizer is not None:
        rust.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    _add(rust, _SPECIAL, added)
    rust.post_processor = _bos(rust)
    return _files(rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings)


def _prepended() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _metaspace(prepend_scheme: str) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)


def _unigram(*, byte_fallback: bool, decoder: Any, first: tuple[str, ...], **settings: Any) -> dict[str, str]:
    vocabulary, _ = _sentence_piece_vocabulary()
    words = [token for token in vocabulary if token not in (*_SPECIAL, *_BYTES, *first)]
    pieces = [(token, 0.0) for token in (*first, *(_BYTES if byte_fallback else ()))]
    pieces += [(token, -3.0 - 0.02 * i / len(token)) for i, token in enumerate(words)]
    model = models.Unigram(pieces, unk_id=first.index("<unk>"), byte_fallback=byte_fallback)
    rust = RustTokenizer(model)
    rust.normalizer = normalizers.NFKC()
    rust.pre_tokenizer = _metaspace("always")
    rust.decoder = decoder
    _add(rust, first, ())
    return _files(rust, eos_token="</s>", unk_token="<unk>", **settings)


# ------------------------------------------------------------------------------------------------------------- words and their parts


def _words(rust: RustTokenizer) -> Counter[str]:
    """Return how often each word of the corpus occurs. Trainers give the parts of words their ids in an order of chance."""
    texts = map(rust.normalizer.normalize_str, _CORPUS)
    return Counter(word for text in texts for word, _ in rust.pre_tokenizer.pre_tokenize_str(text))


def _word_piece(*, lowers: bool) -> dict[str, str]:
    rust = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = _words(rust)
    letters = sorted(set("".join(words)))
    frequent = [word for word in sorted(words, key=lambda word: (-words[word], word)) if len(word) > 1]
    names = [*special, *letters, *(f"##{letter}" for letter in letters), *frequent[:40], "##ld", "##he"]
    rust.model = models.WordPiece(dict(zip(names, range(len(names)), strict=True)), unk_token="[UNK]")
    rust.add_special_tokens(special)
    rust.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    ids = [(token, rust.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    rust.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    given = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return _files(rust, tokenizer_class="BertTokenizer", do_lower_case=lowers, **given)


def _end_of_word() -> dict[str, str]:
    """Files in the manner of GPT-1 and CLIP: a sign at the end of each word instead of a space before it."""
    rust = RustTokenizer(models.BPE())
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    letters = sorted(set("".join(_words(rust))))
    merges = [("t", "h"), ("th", "e</w>"), ("h", "e"), ("l", "l"), ("a", "b"), ("ab", "c</w>")]
    names = [*_SPECIAL, *letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    vocabulary = dict(zip(names, range(len(names)), strict=True))
    rust.model = models.BPE(vocabulary, merges, unk_token="<unk>", end_of_word_suffix="</w>")
    rust.add_special_tokens(list(_SPECIAL))
    rust.decoder = decoders.BPEDecoder(suffix="</w>")
    return _files(rust, unk_token="<unk>", eos_token="</s>")


def _word_level() -> dict[str, str]:
    """Files of whole words, without a decoder: transformers joins the words with spaces."""
    rust = RustTokenizer(models.WordLevel(unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.train_from_iterator(_CORPUS, trainers.WordLevelTrainer(special_tokens=list(_SPECIAL), show_progress=False))
    return _files(rust, unk_token="<unk>", eos_token="</s>")


# ------------------------------------------------------------------------------------------------------------- written in Python


def _in_python(tokenizer_class: str, **files: str) -> dict[str, str]:
    return {"tokenizer_config.json": json.dumps({"tokenizer_class": tokenizer_class}), **files}


def _ctrl() -> dict[str, str]:
    """Files of a BPE whose tokens end with a sign where the word goes on."""
    letters = sorted(
        {character for character in "".join(_CORPUS) if character.isascii() and character.isprintable()} - {" "}
    )
    merges = ["t h", "th e</w>", "h e", "l l", "a b", "ab c</w>"]
    names = ["<unk>", *(f"{letter}@@" for letter in letters), *letters, "th@@", "the", "he@@", "ll@@", "ab@@", "abc"]
    vocabulary = json.dumps({name: i for i, name in enumerate(names)})
    text = "\n".join(["#version: 0.2", *merges, ""])
    return _in_python("CTRLTokenizer", **{"vocab.json": vocabulary, "merges.txt": text})


# ------------------------------------------------------------------------------------------------------------------------- large


def _of_262k_entries() -> dict[str, str]:
    """Files as Gemma 3 has: most of a big vocabulary are words that no test spells."""
    files = dict(_gemma())
    content = json.loads(files["tokenizer.json"])
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"▁w{i}": i for i in range(len(vocabulary), 262_144)}
    return {**files, "tokenizer.json": json.dumps(content, ensure_ascii=False)}


# ------------------------------------------------------------------------------------------------------------------------- files


def _parts(rust: RustTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(rust.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _add(rust: RustTokenizer, special: tuple[str, ...], added: tuple[AddedToken, ...]) -> None:
    rust.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    for token in added:
        (rust.add_special_tokens if token.special else rust.add_tokens)([token])


def _num_ids(tokenizer_json: str) -> int:
    content = json.loads(tokenizer_json)
    vocabulary = content["model"]["vocab"]
    highest: int = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    return 1 + max(highest, *(int(token["id"]) for token in content["added_tokens"]), 0)


def _bos(rust: RustTokenizer) -> Any:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", rust.token_to_id("<s>"))])


def _files(rust: RustTokenizer, *, tokenizer_class: str = "PreTrainedTokenizerFast", **settings: Any) -> dict[str, str]:
    content = json.loads(rust.to_str())
    fields = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
    added = {str(token["id"]): {field: token[field] for field in fields} for token in content["added_tokens"]}
    settings |= {
        "tokenizer_class": tokenizer_class,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
        "model_max_length": 10**30,
    }
    return {"tokenizer.json": json.dumps(content, ensure_ascii=False), "tokenizer_config.json": json.dumps(settings)}


_TOOLS = (
    AddedToken("<tool>", lstrip=True, rstrip=False, normalized=False),
    AddedToken("</tool>", lstrip=False, rstrip=True, normalized=False),
    AddedToken("now", single_word=True, normalized=True),
    AddedToken("<|user|>", rstrip=True, normalized=False, special=True),
    AddedToken("<|assistant|>", rstrip=True, normalized=False, special=True),
    AddedToken("<|end|>", lstrip=True, rstrip=True, normalized=False, special=True),
)
"""Added tokens as Phi 3 and T5 have: they take spaces beside them with them, or stand as whole words alone."""

_llama = functools.partial(_sentence_piece, tokenizer_class="LlamaTokenizer", normalizer=_prepended())
_gemma = functools.partial(_sentence_piece, normalizer=normalizers.Replace(" ", "▁"), strips=False)
_METASPACE = ("leading_space", "leading_spaces", "sign_of_space")
"""Lost where a space is put before a text that has none, and the sign that stands for it is read as one."""

_BYTES_THEN_SPACES = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
_T5 = {"tokenizer_class": "T5Tokenizer", "pad_token": "<pad>", "extra_ids": 0}
_entry, _with = ZooTokenizer, functools.partial

_ENTRIES = (
    # Byte level.
    _entry("gpt2", _with(_byte_level, writes_bos=False), is_byte_level=True),
    _entry("gpt2_prefix_space", _with(_byte_level, add_prefix_space=True), is_byte_level=True, loses=None),
    _entry("llama3", _with(_byte_level, pre_tokenizer=_split_then_bytes(), added=_TOOLS[3:]), is_byte_level=True),
    _entry("qwen_nfc", _with(_byte_level, normalizer=normalizers.NFC()), is_byte_level=True, loses=("combining",)),
    _entry("nfkc", _with(_byte_level, normalizer=normalizers.NFKC()), is_byte_level=True, loses=("combining", "compatibility")),
    _entry("lowercase", _with(_byte_level, normalizer=normalizers.Lowercase()), is_byte_level=True, loses=None),
    _entry("strip", _with(_byte_level, normalizer=normalizers.Strip()), is_byte_level=True, loses=None),
    _entry("byte_level_added", _with(_byte_level, added=_TOOLS), is_byte_level=True),
    _entry("byte_level_gaps", _with(_byte_level, id_step=3), is_byte_level=True, num_padding_ids=64),
    _entry("byte_level_small_model", _byte_level, is_byte_level=True, num_padding_ids=-16),
    # The classes that Llama 2, Mistral 0.x, TinyLlama and Phi 3 name. transformers 5 makes their normaliser anew.
    _entry("llama2", _with(_llama, legacy=False), has_byte_fallback=True, loses=_METASPACE),
    _entry("mistral", _with(_llama, legacy=True), has_byte_fallback=True, loses=_METASPACE),
    _entry("tiny_llama", _with(_llama, legacy=False, add_prefix_space=True), has_byte_fallback=True, loses=_METASPACE),
    _entry("no_prefix_space", _with(_llama, legacy=False, add_prefix_space=False), has_byte_fallback=True, loses=_METASPACE[2:]),
    _entry("phi3", _with(_llama, legacy=False, added=_TOOLS), has_byte_fallback=True, loses=_METASPACE),
    _entry("gemma", _with(_gemma, tokenizer_class="GemmaTokenizer", pad_token="<unk>", mask_token="<unk>"), has_byte_fallback=True, loses=_METASPACE[2:]),
    # The same as tokenizer.json alone says it.
    _entry("llama2_file", _with(_sentence_piece, normalizer=_prepended()), has_byte_fallback=True, loses=_METASPACE[2:]),
    _entry("metaspace_first", _with(_sentence_piece, pre_tokenizer=_metaspace("first")), has_byte_fallback=True, loses=_METASPACE),
    _entry("metaspace_always", _with(_sentence_piece, pre_tokenizer=_metaspace("always"), added=_TOOLS), has_byte_fallback=True, loses=_METASPACE),
    _entry("gemma_file", _gemma, has_byte_fallback=True, loses=_METASPACE[2:], num_padding_ids=64),
    # Others in Rust.
    _entry("unigram_bytes", _with(_unigram, byte_fallback=True, decoder=_BYTES_THEN_SPACES, first=_SPECIAL), has_byte_fallback=True, loses=(*_METASPACE, "combining", "compatibility")),
    _entry("t5", _with(_unigram, byte_fallback=False, decoder=decoders.Metaspace(), first=("<pad>", "</s>", "<unk>"), **_T5), loses=None),
    _entry("bert", _with(_word_piece, lowers=True), loses=None),
    _entry("bert_cased", _with(_word_piece, lowers=False), loses=None),
    _entry("gpt1", _end_of_word, loses=None),
    _entry("word_level", _word_level, loses=None),
    # In Python.
    _entry("byt5", _with(_in_python, "ByT5Tokenizer"), num_ids=384),
    _entry("ctrl", _ctrl, loses=None, num_ids=93),
)  # fmt: skip

ZOO = {entry.name: entry for entry in _ENTRIES}
"""Entries by name. Each is made and loaded within some 20 ms, once transformers has been imported."""

LARGE = {
    entry.name: entry
    for entry in (
        _entry("gemma_262k", _of_262k_entries, has_byte_fallback=True, loses=_METASPACE[2:]),
        _entry("canine", _with(_in_python, "CanineTokenizer"), num_ids=0x110000, loses=("control",)),
    )
}
"""Entries that take a second or more."""
