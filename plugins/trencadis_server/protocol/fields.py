"""Fields of OpenAI's API and vLLM's extensions without an effect on this server, and whether they are ignored or refused.

Fields with an effect are those of the request classes in this package; both together are all that is documented. Any
other field is refused with a suggestion. ``docs`` shows both as one table
(:mod:`trencadis_server.protocol.fields_page`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["OTHER_FIELDS", "OtherField", "other_fields"]


@attrs.frozen
class OtherField:
    """A documented field without an effect.

    Attributes:
        name: Name of the field in requests.
        endpoints: Names of the endpoints that document it.
        why: Reason why it is ignored or refused; a clause that ends a sentence.
        accepted: None: any value is accepted and ignored. Else these values only, since they ask for nothing; null always.
        moot_if: Name and value of another field with which any value of this one asks for nothing.
    """

    name: str
    endpoints: tuple[str, ...]
    why: str
    accepted: tuple[Any, ...] | None = None
    moot_if: tuple[str, Any] | None = None

    def accepts(self, value: Any, body: Mapping[str, Any]) -> bool:
        """Return whether a value is accepted and ignored, given the whole body. Pure."""
        if self.accepted is None or value is None:
            return True
        if self.moot_if is not None and _same(body.get(self.moot_if[0]), self.moot_if[1]):
            return True
        return any(_same(value, one) for one in self.accepted)


def _same(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; 1 differs from true. Pure."""
    return type(value) is type(other) and bool(value == other)


_CHAT = ("chat",)
_GENERATION = ("chat", "completions")
_ALL = ("chat", "completions", "embeddings")
_NO_TOOLS = "tool calls are not parsed"

OTHER_FIELDS: tuple[OtherField, ...] = (
    OtherField("metadata", _CHAT, "it labels stored answers, and none is stored"),
    OtherField("moderation", _CHAT, "there is no moderation", ()),
    OtherField("parallel_tool_calls", _CHAT, "it limits tool calls, and none is made"),
    OtherField("prediction", _CHAT, "it speeds up the answer and changes no token; see [speculation] for that"),
    OtherField("prompt_cache_key", _CHAT, "it routes between machines; the prefix cache needs no key"),
    OtherField("prompt_cache_options", _CHAT, "prompts are cached as long as there is room"),
    OtherField("prompt_cache_retention", _CHAT, "prompts are cached as long as there is room"),
    OtherField("reasoning_effort", _CHAT, "templates that know it take it from chat_template_kwargs"),
    OtherField("safety_identifier", _CHAT, "there is no moderation"),
    OtherField("service_tier", _CHAT, "there is one tier; see priority"),
    OtherField("verbosity", _CHAT, "the models served here have no such control"),
    OtherField("include_reasoning", _CHAT, "reasoning is part of the text"),
    OtherField("audio", _CHAT, "answers are text", ()),
    OtherField("modalities", _CHAT, "answers are text", (["text"],)),
    OtherField("store", _CHAT, "answers are not stored", (False,)),
    OtherField("web_search_options", _CHAT, "there is no search", ()),
    OtherField("tools", _CHAT, _NO_TOOLS, ([],), ("tool_choice", "none")),
    OtherField("tool_choice", _CHAT, _NO_TOOLS, ("none", "auto")),
    OtherField("functions", _CHAT, _NO_TOOLS, ([],), ("function_call", "none")),
    OtherField("function_call", _CHAT, _NO_TOOLS, ("none", "auto")),
    OtherField("guided_decoding_backend", _GENERATION, "grammars are compiled by one library"),
    OtherField("guided_whitespace_pattern", _GENERATION, "JSON has white space of one kind", ()),
    OtherField("spaces_between_special_tokens", _GENERATION, "text is what the tokenizer decodes", (True,)),
    OtherField("no_stop_trim", _GENERATION, "see include_stop_str_in_output", (False,)),
    OtherField("return_hidden_states", _GENERATION, "hidden states stay in the engine", (False,)),
    OtherField("separate_reasoning", _CHAT, "reasoning is part of the text"),
    OtherField("stream_reasoning", _CHAT, "reasoning is part of the text"),
    OtherField("chat_template", _CHAT, "templates are programs, and programs do not come with requests", ()),
    OtherField("documents", _CHAT, "give them in messages, or in chat_template_kwargs' own names", ([],)),
    OtherField("mm_processor_kwargs", _GENERATION, "prompts are text", ({},)),
    OtherField("suffix", ("completions",), "text is only continued, not filled in", ("",)),
    OtherField("truncate_prompt_tokens", ("embeddings",), "a cut text has another meaning; cut it before", ()),
    OtherField("additional_data", ("embeddings",), "there is nothing it could reach", ()),
)


def other_fields(endpoint: str) -> dict[str, OtherField]:
    """Return an endpoint's documented fields without an effect, by name. Pure."""
    return {field.name: field for field in OTHER_FIELDS if endpoint in field.endpoints}
