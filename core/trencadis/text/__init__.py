"""From text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings."""

from __future__ import annotations

from trencadis.text.chat import Message, encode_chat
from trencadis.text.detokenizer import Detokenizer
from trencadis.text.prefixes import read_prefixes
from trencadis.text.stop import StopChecker
from trencadis.text.tokenizer import Tokenizer, load_tokenizer, needs_tokenizer, resolve_model_path
from trencadis.text.vocabulary import model_finder, vocabulary_of, vocabulary_reader

__all__ = [
    "Detokenizer",
    "Message",
    "StopChecker",
    "Tokenizer",
    "encode_chat",
    "load_tokenizer",
    "model_finder",
    "needs_tokenizer",
    "read_prefixes",
    "resolve_model_path",
    "vocabulary_of",
    "vocabulary_reader",
]
