"""From text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings."""

from __future__ import annotations

from trencadis.text.chat import Message, encode_chat
from trencadis.text.detokenizer import Detokenizer
from trencadis.text.prefixes import read_prefixes
from trencadis.text.stop import StopChecker
from trencadis.text.tokenizer import Tokenizer, load_tokenizer, resolve_model_path

__all__ = [
    "Detokenizer",
    "Message",
    "StopChecker",
    "Tokenizer",
    "encode_chat",
    "load_tokenizer",
    "read_prefixes",
    "resolve_model_path",
]
