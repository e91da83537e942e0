"""What a text must be: the part of a request that constrains its output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trencadis.errors import InvalidRequestError, must_be_one_of
from trencadis.faults import shown
from trencadis.keywords import suggesting
from trencadis.records.plain import is_text

__all__ = ["MAX_CHOICES", "MAX_STRUCTURE_CHARACTERS", "StructuredOutput"]

MAX_CHOICES = 1024
"""The most texts to choose from."""

MAX_STRUCTURE_CHARACTERS = 65_536
"""The longest schema, regex or grammar, and the most characters of all choices: reading them takes time in proportion."""

_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value)


@suggesting
@attrs.frozen(kw_only=True)
class StructuredOutput:
    """What a request's text must be. The classmethods make one of each kind.

    Every text that ends by itself is of the kind; one that ``max_tokens``, a stop string or a stop token cuts is the beginning of
    one that is. Whether a schema, regex or grammar can be served, the engine says when the request comes.

    Attributes:
        kind: ``json_schema``, ``json_object``, ``regex``, ``choice`` or ``grammar``.
        text: The schema as JSON, the regex or the grammar; empty for the other kinds.
        choices: The texts to choose from, for ``choice``.

    Raises:
        InvalidRequestError: An unknown kind, a missing or too long text, or a schema that is no JSON.
    """

    kind: str
    text: str = ""
    choices: tuple[str, ...] = attrs.field(default=(), converter=_texts)

    def __attrs_post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise _refusal(f"kind = {shown(self.kind)}: {must_be_one_of(str(self.kind), _KINDS)}")
        if not isinstance(self.text, str) or not all(isinstance(choice, str) for choice in self.choices):
            raise _refusal(f"{self.kind}: text and choices must be strings.")
        self._check_parts()
        if len(self.choices) > MAX_CHOICES:
            raise _refusal(f"choice has {len(self.choices)} texts; the most are {MAX_CHOICES}.")
        if not all(map(is_text, (self.text, *self.choices))):
            raise _refusal(f"{self.kind} has half a surrogate pair: this is no text.")
        length = len(self.text) + sum(map(len, self.choices))
        if length > MAX_STRUCTURE_CHARACTERS:
            raise _refusal(f"{self.kind} has {length} characters; the most are {MAX_STRUCTURE_CHARACTERS}.")
        if self.kind == "json_schema":
            _check_schema(self.text)

    def _check_parts(self) -> None:
        wants_text, wants_choices = self.kind in ("json_schema", "regex", "grammar"), self.kind == "choice"
        if wants_text != bool(self.text):
            raise _refusal(f"{self.kind} needs a text." if wants_text else f"{self.kind} takes no text.")
        if wants_choices != bool(self.choices):
            raise _refusal("choice needs at least one text." if wants_choices else f"{self.kind} takes no choices.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> StructuredOutput:
        """Return what asks for JSON of a schema.

        Args:
            schema: A JSON schema, as an object or as its text.
        """
        return cls(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Return what asks for any JSON object."""
        return cls(kind="json_object")

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        r"""Return what asks for a text that a regex matches as a whole; ``\d`` and ``\w`` are those of every script, as in Rust."""
        return cls(kind="regex", text=pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> StructuredOutput:
        """Return what asks for one of some texts."""
        return cls(kind="choice", choices=choices)

    @classmethod
    def grammar(cls, grammar: str) -> StructuredOutput:
        """Return what asks for a text of a context-free grammar.

        Args:
            grammar: In the notation of Lark, whose first rule is ``start``, or in GBNF, whose first rule is ``root``.
        """
        return cls(kind="grammar", text=grammar)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"json_schema is no JSON: {error}.") from None
    if not isinstance(schema, dict | bool):
        raise _refusal(f"json_schema = {shown(schema)} must be an object.")


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured output: {problem}", field="structured")
