"""From text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings."""

from __future__ import annotations

from trencadis.text.chat import encode_chat, ends_of_turn, render_chat
from trencadis.text.chat_template import ChatTemplate, Message, chat_template_of
from trencadis.text.detokenizer import Detokenizer
from trencadis.text.model_path import check_model_path, is_hub_id, resolve_model_path
from trencadis.text.stop import StopChecker
from trencadis.text.tokenizer import (
    Tokenizer,
    load_configured_tokenizer,
    load_tokenizer,
    needs_tokenizer,
    read_prefixes,
)
from trencadis.text.vocabulary import model_finder, vocabulary_of, vocabulary_reader

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "Message",
    "StopChecker",
    "Tokenizer",
    "chat_template_of",
    "check_model_path",
    "encode_chat",
    "ends_of_turn",
    "is_hub_id",
    "load_configured_tokenizer",
    "load_tokenizer",
    "model_finder",
    "needs_tokenizer",
    "read_prefixes",
    "render_chat",
    "resolve_model_path",
    "vocabulary_of",
    "vocabulary_reader",
]
