"""The tokenizer as components see it, read when the first of them asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

from trencadis.config import Config
from trencadis.interfaces import NamedModel, Vocabulary
from trencadis.records import ModelSource
from trencadis.text.model_path import resolve_model_path
from trencadis.text.token_check import token_fault
from trencadis.text.tokenizer import Tokenizer, load_configured_tokenizer, load_tokenizer, needs_tokenizer

__all__ = ["model_finder", "vocabulary_of", "vocabulary_reader"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


def vocabulary_reader(config: Config) -> Callable[[], Vocabulary]:
    """Return what reads the vocabulary of the configured model, once; from any thread.

    The first call loads the tokenizer, and raises ``ModelLoadError`` if that fails.
    """
    lock = threading.Lock()
    read: list[Vocabulary] = []

    def vocabulary() -> Vocabulary:
        with lock:
            if not read:
                read.append(vocabulary_of(load_configured_tokenizer(config)))
            return read[0]

    return vocabulary


def model_finder(config: Config) -> Callable[[str], NamedModel]:
    """Return what finds further models: they are held in the data type of the configured one, and trusted as it is."""
    model = config.model

    def find(path: str) -> NamedModel:
        source = ModelSource(
            remember=config.cache.models == "on",
            path=resolve_model_path(path),
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
        )
        return NamedModel(
            source=source,
            vocabulary=lambda: vocabulary_of(
                load_tokenizer(path, trust_remote_code=model.trust_remote_code, remembers=config.cache.models != "off")
            ),
        )

    return find


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer. Pure; O(vocabulary).

    Raises:
        InvalidRequestError: There is no tokenizer.
    """
    if not tokenizer.has_text:
        raise needs_tokenizer("the vocabulary")
    tokens = tokenizer.all_token_bytes()
    if (
        tokenizer.byte_table is None
    ):  # then such a text may be part of a character, of which the decoder alone knows the bytes
        tokens = tuple(b"" if _REPLACEMENT in data else data for data in tokens)
    return Vocabulary(
        tokens=tokens,
        special_token_ids=tokenizer.special_token_ids,
        eos_token_id=tokenizer.eos_token_id,
        encode=tokenizer.encode_literally,
        fault=cache(lambda: token_fault(tokenizer, tokens)),
    )
