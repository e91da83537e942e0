"""Fields common to chat and text completions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from pydantic import AfterValidator, Field, StringConstraints, create_model
from pydantic_core import PydanticCustomError

from trencadis.errors import InvalidRequestError
from trencadis.records import LEAST_FLOAT, MAX_LOGPROBS, Limits, OneOf, SamplingParams, parameter_help
from trencadis.records.request import transfer_table
from trencadis_server.protocol.base import EndpointRequest, LogitBias, RequestModel, TokenIds, said_as
from trencadis_server.protocol.structured import Choices, Pattern, ResponseFormat, Schema, StructuredOutputs

__all__ = ["GenerationRequest", "StreamOptions"]

_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 1024
_MAX_STOP_TOKENS = 1024
_MAX_BAD_WORDS = 1000
_MAX_WORD_CHARACTERS = 256
_MAX_LABEL_CHARACTERS = 1024
_MAX_INT = 2**31 - 1
_OF_ENDPOINTS = frozenset({"best_of", "logprobs", "max_tokens", "seed"})
"""Sampling parameters that not every endpoint has, or whose values differ in the API."""

# Each of these costs the server time in proportion to its length, for every client.
Stop = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
Stops = Annotated[
    Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS, fail_fast=True)],
    said_as(f"a string, or a list of at most {_MAX_STOPS}, each of 1 to {_MAX_STOP_CHARACTERS} characters"),
]
Word = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_WORD_CHARACTERS)]
Label = Annotated[str, StringConstraints(max_length=_MAX_LABEL_CHARACTERS)]


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("zero", "must be at least 1, or -1 for as many tokens as fit")
    return value


def _short_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse transfer parameters that the engine would refuse; checked here, off the event loop, as they may be long."""
    try:
        transfer_table(value)
    except InvalidRequestError as error:
        raise PydanticCustomError("too_long", "{why}", {"why": str(error)}) from None
    return value


def _fields_of_sampling() -> dict[str, Any]:
    """Return fields for the numbers and switches of ``SamplingParams``, with names, ranges and descriptions. Pure.

    A class may redefine one of them if the API's range differs.
    """
    helps = parameter_help()
    found: dict[str, Any] = {}
    for parameter in attrs.fields(SamplingParams):
        kind = _type_of(parameter)
        if kind is not None and parameter.name not in _OF_ENDPOINTS:
            text = f"{helps.get(parameter.name, '')} Default: {json.dumps(parameter.default)}."
            found[parameter.name] = (kind | None, Field(None, description=text.lstrip()))
    return found


def _type_of(parameter: attrs.Attribute[Any]) -> Any:
    """Return the type of a sampling parameter with its range; None if it is neither a number nor a switch. Pure."""
    limits = parameter.validator
    if isinstance(limits, OneOf):
        return Literal[limits.allowed]
    if not isinstance(limits, Limits):
        return bool if isinstance(parameter.default, bool) else None
    least = LEAST_FLOAT if limits.excludes_low else limits.low
    bounds = Field(ge=least, lt=limits.high) if limits.excludes_high else Field(ge=least, le=limits.high)
    return Annotated[int if limits.is_whole else float, bounds]


if TYPE_CHECKING:

    class SamplingFields(EndpointRequest):
        """Fields that a request shares with ``SamplingParams``."""

        def __getattr__(self, name: str) -> Any: ...
else:
    SamplingFields = create_model("SamplingFields", __base__=EndpointRequest, **_fields_of_sampling())


class StreamOptions(RequestModel):
    """Additional content of a stream."""

    include_usage: bool | None = Field(None, description="One more chunk with the usage, before the end.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk; vLLM's.")
    include_obfuscation: bool | None = Field(None, description="Ignored: chunks are not padded.")


class GenerationRequest(SamplingFields):
    """Parameters for continuing a prompt, whatever form the prompt has. A field that is null has its default."""

    # OpenAI's
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="Choices for each prompt; 1.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0 is greedy; 1.")
    max_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = Field(
        None, description="The most tokens of a choice; the model must have room for them."
    )
    stop: Stops | None = Field(None, description=f"One string, or up to {_MAX_STOPS}, that end the text.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream.")
    logit_bias: LogitBias | None = Field(None, description="Added to logits, by token id.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None,
        description="Makes the tokens repeatable; choice i draws with seed + i, before best_of puts them in order.",
    )
    user: Label | None = Field(
        None,
        description="Whom fair scheduling counts it for, and who shares its cached prefixes, within the API key; users of one key share "
        "its weight.",
    )
    response_format: ResponseFormat | None = Field(
        None, description="JSON: any object, or of a schema, which is kept to whether or not it is strict; text."
    )
    # vLLM's
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="What the text must be: json (a schema), json_object, regex, choice or grammar (Lark or GBNF).",
    )
    guided_json: Schema | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: Pattern | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: Pattern | None = Field(None, description="The older name of structured_outputs.grammar.")
    dry_sequence_breakers: Annotated[list[Word], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="Strings that end a run; a line break, a colon, a quotation mark and an asterisk."
    )
    logits_processors: Annotated[dict[Label, dict[str, Any]], Field(max_length=_MAX_STOPS)] | None = Field(
        None, description="Processors of other packages that the operator enabled: arguments by name."
    )
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MAX_STOP_TOKENS)] | None = Field(
        None, description="Tokens that end the text."
    )
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        None, description="Only these may be chosen."
    )
    bad_words: Annotated[list[Word], Field(max_length=_MAX_BAD_WORDS, fail_fast=True)] | None = Field(
        None, description=f"Words that never occur in the output, at most {_MAX_BAD_WORDS}."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Log-probabilities of the prompt, with so many alternatives; not with stream."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_MAX_INT), AfterValidator(_not_zero)] | None = Field(
        None,
        description="Keep the last tokens of the prompt only, at least 1, and the special tokens that begin it; -1: as many as fit.",
    )
    priority: Annotated[int, Field(ge=-_MAX_INT, le=_MAX_INT)] | None = Field(
        None, description="Smaller is sooner, if the scheduling policy looks at it; 0."
    )
    weight: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="Share against other tenants, where policy and operator allow it; the operator's setting."
    )
    ttft_target_ms: Annotated[float, Field(gt=0, le=1e9)] | None = Field(
        None, description="Wanted time to the first token, for policies that look at it."
    )
    tpot_target_ms: Annotated[float, Field(gt=0, le=1e9)] | None = Field(
        None, description="Wanted time from token to token at most, for policies that look at it."
    )
    cache_salt: Label | None = Field(
        None,
        description="Share cached prefixes only with requests of this salt, within the API key, whatever their `user`.",
    )
    kv_transfer_params: Annotated[dict[str, Any], Field(max_length=64), AfterValidator(_short_json)] | None = Field(
        None,
        description="What the KV connector is to know, such as where another engine has the prompt's KV; the answer may have some, too.",
    )
    return_token_ids: bool | None = Field(None, description="The token ids of prompt and output, too.")
    use_beam_search: bool | None = Field(
        None,
        description="Search the n likeliest texts instead of drawing; not with stream, nor with what changes draws.",
    )
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(
        None, description="Beam search divides a text's log-probability by its length to this power; 1."
    )
    early_stopping: Annotated[bool | Literal["never"], said_as('true, false or "never"')] | None = Field(
        None, description="When beam search ends, as in transformers; false."
    )

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
