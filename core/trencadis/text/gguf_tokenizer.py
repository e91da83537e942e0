"""The tokenizer in a ``.gguf`` file: its vocabulary, merges and special tokens, made into a tokenizer of transformers by its converters.

The converters take what the file says as a mapping; here it comes from the file's description, which is read once for each process.
Gemma's vocabularies have no merges: they follow from its 262,144 tokens, and are found here, in a third of the time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from trencadis.errors import ModelLoadError
from trencadis.gguf_file import GgufFile, StringList, read_gguf

__all__ = ["load_gguf_tokenizer"]

_LISTS: Final = ("tokens", "merges")
_SPECIAL: Final[Mapping[str, str]] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Special tokens by the name that transformers has for them, and the file's key."""

_GEMMA: Final = frozenset(("gemma", "gemma2", "gemma3"))
_SPACE: Final = "\u2581"


def load_gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer of transformers that a file describes.

    Args:
        path: The file.

    Raises:
        ModelLoadError: It has no tokenizer, or one whose kind is not known, or its special tokens are not in it.
    """
    from transformers import PreTrainedTokenizerFast

    class GgufTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc] # transformers has no types
        """Takes a tokenizer as it is, where its base class copies one through its text in JSON."""

        def __init__(self, backend: Any, **settings: Any) -> None:
            self._tokenizer = backend
            super().__init__(**settings)

    file = read_gguf(path)
    if not isinstance(file.metadata.get("tokenizer.ggml.tokens"), StringList):
        raise ModelLoadError(
            f"{path}: the file holds no tokenizer.",
            hint='Name a directory, file or hub id that has one in model.tokenizer, or set it to "none".',
        )
    said = _said(file)
    settings = _settings(file, said["tokens"])
    return GgufTokenizer(_backend(file, said), **settings)


def _said(file: GgufFile) -> dict[str, Any]:
    """Return what a file says of its tokenizer, by the names that transformers' converters have."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    said: dict[str, Any] = {}
    for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items():
        value = file.metadata.get(f"tokenizer.{key}")
        if isinstance(value, StringList):
            said[name] = file.strings(f"tokenizer.{key}")
        elif value is not None:
            said[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return said


def _settings(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Return what a tokenizer of transformers is told beside its vocabulary, as its own reader of such files has it."""
    metadata, settings = file.metadata, dict[str, Any]()
    for name, key in _SPECIAL.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None and token_id >= len(tokens):
            raise ModelLoadError(
                f"{file.path}: tokenizer.ggml.{key} is {token_id}, and there are {len(tokens)} tokens."
            )
        settings[name] = None if token_id is None else tokens[token_id]
    for name in ("add_bos_token", "add_eos_token"):
        if f"tokenizer.ggml.{name}" in metadata:
            settings[name] = metadata[f"tokenizer.ggml.{name}"]
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":  # older files do not say it, and llama.cpp adds one
        settings.setdefault("add_bos_token", True)
    elif kind == "gemma4":  # files say that one is added, but its chat template writes it
        settings["add_bos_token"] = False
    templates = _templates(file)
    if templates:
        settings["chat_template"] = templates["default"] if list(templates) == ["default"] else templates
    return settings


def _templates(file: GgufFile) -> dict[str, str]:
    """Return chat templates by name; the one without a name is ``default``."""
    prefix = "tokenizer.chat_template"
    named = {
        key.removeprefix(prefix).removeprefix("."): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    return {name or "default": value for name, value in named.items() if isinstance(value, str)}


def _backend(file: GgufFile, said: dict[str, Any]) -> Any:
    """Return a tokenizer of the package ``tokenizers``."""
    from transformers import GemmaTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_TOKENIZER_TYPES,
        add_gguf_special_tokens,
        convert_gguf_tokenizer,
    )

    kind = said.get("tokenizer_type")
    if kind not in GGUF_TOKENIZER_TYPES:
        raise ModelLoadError(
            f"{file.path}: its tokenizer is of the kind {kind!r}; known are {', '.join(sorted(GGUF_TOKENIZER_TYPES))}.",
            hint="Name a directory or hub id with the same tokenizer in model.tokenizer.",
        )
    if kind != "llama" or file.architecture not in _GEMMA or "merges" in said:
        return convert_gguf_tokenizer(file.architecture, said)[0]
    # Runs of spaces are stored as such, and looked up as what stands for them.
    spelt = (_SPACE * len(token) if " " in token and not token.strip() else token for token in said["tokens"])
    vocabulary = {token: token_id for token_id, token in enumerate(spelt)}
    built = GemmaTokenizer(vocab=vocabulary, merges=_merges(vocabulary))
    return add_gguf_special_tokens(built, said).backend_tokenizer


def _merges(tokens: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, in the order of those that they make, pairs with a longer beginning first. Pure.

    Args:
        tokens: Their ids, in the order of these.
    """
    same = {token: token for token in tokens}
    known, merges = same.get, list[tuple[str, str]]()
    for token in tokens:
        for length in range(len(token) - 1, 0, -1):
            begin = known(token[:length])
            if begin is not None and (end := known(token[length:])) is not None:
                merges.append((begin, end))
    return merges
