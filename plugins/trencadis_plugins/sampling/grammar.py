"""Compiles what a request asks its text to be into grammars of llguidance, once for all requests that ask the same.

StructuredOutput ─▶ grammar text ─▶ LLMatcher, kept ─▶ a copy for each sequence
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trencadis.errors import InvalidRequestError
from trencadis.interfaces import Vocabulary
from trencadis.records import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Grammars", "grammars_of"]

_MAX_KEPT = 256
_WHITE_SPACE = " "
"""Between the signs of JSON: one space or nothing. Small models never leave off where they may indent, until their tokens are used up."""

_MAX_GRAMMAR_SIZE = 20_000
"""Symbols of a grammar, such as those of an object with 2,000 properties; a third of a second to compile."""

_MAX_REASON = 500


@lru_cache(maxsize=2)
def grammars_of(vocabulary: Vocabulary) -> Grammars:
    """Return the compiler for a vocabulary: the same for all who ask in this process.

    Raises:
        InvalidRequestError: The library is not installed, or the tokenizer has no end-of-sequence token.
    """
    return Grammars(vocabulary)


class Grammars:
    """Compiled grammars for one vocabulary. May be used from several threads.

    Args:
        vocabulary: Of the model.

    Attributes:
        num_tokens: Of the vocabulary.
        eos_token_id: By which a mask says that the text may end.
        special_token_ids: Tokens that are no text.

    Raises:
        InvalidRequestError: The library is not installed, or the tokenizer has no end-of-sequence token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.num_tokens = len(vocabulary.tokens)
        self.eos_token_id = _end_of(vocabulary)
        self.special_token_ids = vocabulary.special_token_ids
        self._tokenizer = _llguidance().LLTokenizer(
            _llguidance().TokenizerWrapper(_TokenTable(vocabulary, self.eos_token_id))
        )
        self._kept: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, wanted: StructuredOutput) -> LLMatcher:
        """Return a new matcher at the beginning of a text. Takes milliseconds the first time, then microseconds.

        Raises:
            InvalidRequestError: The library cannot read the schema, regex or grammar, or no text is of that kind.
        """
        with self._lock:
            matcher = self._kept.get(wanted)
            if matcher is None:
                matcher = self._kept[wanted] = self._compiled(wanted)
                if len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(wanted)
            return matcher.deep_copy()

    def _compiled(self, wanted: StructuredOutput) -> LLMatcher:
        library = _llguidance()
        limits = library.LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False)
        try:
            text = _grammar_text(wanted)
        except Exception as error:  # the notation is read in Python, by a parser that may fail in any way
            raise _refusal(wanted, str(error) or type(error).__name__) from error
        matcher: LLMatcher = library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        # The first mask compiles what the constructor left for later.
        if not matcher.is_error():
            matcher.compute_bitmask()
        reason = matcher.get_error()
        is_barren = matcher.is_stopped() and not matcher.is_accepting() and not reason
        if is_barren or reason.startswith("NoExtension"):
            raise _refusal(wanted, "no text is of this kind.")
        if reason:
            raise _refusal(wanted, reason)
        return matcher


class _TokenTable:
    """A vocabulary with the names that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        # Bytes are refused, by which the library learns to come with text.
        if not isinstance(text, str):
            raise TypeError("this tokenizer reads text")
        return list(self._encode(text))


def _end_of(vocabulary: Vocabulary) -> int:
    if vocabulary.eos_token_id is None:
        raise InvalidRequestError(
            "structured output: the tokenizer names no end-of-sequence token, so that no text could end.",
            hint="Set eos_token in the model's tokenizer_config.json, or leave the field out.",
            field="structured",
        )
    return vocabulary.eos_token_id


def _grammar_text(wanted: StructuredOutput) -> str:
    """Return the grammar in the library's own form. Pure."""
    library = _llguidance()
    match wanted.kind:
        case "json_schema" | "json_object":
            schema = wanted.text or '{"type": "object"}'
            return str(library.LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _WHITE_SPACE}))
        case "choice":
            return str(library.grammar_from("choice", list(wanted.choices)))
        case kind:
            return str(library.grammar_from(kind, wanted.text))


def _refusal(wanted: StructuredOutput, reason: str) -> InvalidRequestError:
    reason = reason.strip()
    shown = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} ..."
    return InvalidRequestError(f"structured output ({wanted.kind}) cannot be served: {shown}", field="structured")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequestError(
            f"structured output needs llguidance, which cannot be imported: {error}.",
            hint='The operator can add it: pip install "trencadis[structured]".',
            field="structured",
        ) from error
    return llguidance
