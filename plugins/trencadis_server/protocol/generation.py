"""Fields that chat and text completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from trencadis.errors import InvalidRequestError
from trencadis.records.request import transfer_table
from trencadis.records.sampling import LEAST_FLOAT, MAX_LOGPROBS
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
    """Refuse transfer parameters that the engine would not take: here, where a long value is looked at beside the event loop."""
    try:
        transfer_table(value)
    except InvalidRequestError as error:
        raise PydanticCustomError("too_long", "{why}", {"why": str(error)}) from None
    return value


class StreamOptions(RequestModel):
    """What a stream has besides text."""

    include_usage: bool | None = Field(None, description="One more chunk with the usage, before the end.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk; vLLM's.")
    include_obfuscation: bool | None = Field(None, description="Ignored: chunks are not padded.")


class GenerationRequest(EndpointRequest):
    """How to continue a prompt, whatever form the prompt has. A field that is null has its default."""

    model: str = Field(description="A name that /v1/models lists.")
    # OpenAI's
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="Choices for each prompt; 1.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0 is greedy; 1.")
    top_p: Annotated[float, Field(ge=LEAST_FLOAT, le=1)] | None = Field(
        None, description="Keep the smallest set of tokens that has this mass; 1."
    )
    max_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = Field(
        None, description="The most tokens of a choice; the model must have room for them."
    )
    stop: Stops | None = Field(None, description=f"One string, or up to {_MAX_STOPS}, that end the text.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream.")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="Subtracted once if a token occurs in the output; 0."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="Subtracted for each time a token occurs in the output; 0."
    )
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
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT)] | None = Field(None, description="Keep the k most likely; 0: all.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Drop tokens less likely than this share of the most likely; 0."
    )
    typical_p: Annotated[float, Field(ge=LEAST_FLOAT, le=1)] | None = Field(
        None, description="Keep tokens of nearly the mean surprise, up to this mass; 1."
    )
    epsilon_cutoff: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Drop tokens less likely than this; 0."
    )
    eta_cutoff: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="The same, with a cutoff that falls with the entropy; 0."
    )
    top_n_sigma: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="Drop tokens so many standard deviations below the largest logit; 0: off."
    )
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="How often the likely tokens but the least likely of them are dropped; 0."
    )
    xtc_threshold: Annotated[float, Field(ge=LEAST_FLOAT, le=1)] | None = Field(
        None, description="Which tokens are likely, to xtc_probability; 0.1."
    )
    mirostat_mode: Literal[0, 2] | None = Field(None, description="2: Mirostat 2.0 steers the surprise; 0.")
    mirostat_tau: Annotated[float, Field(ge=LEAST_FLOAT, le=100)] | None = Field(
        None, description="To how many bits a token; 5."
    )
    mirostat_eta: Annotated[float, Field(ge=LEAST_FLOAT, le=1)] | None = Field(None, description="How fast; 0.1.")
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="Penalty for what makes a repeated run of tokens longer; 0: none."
    )
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = Field(
        None, description="By how much the penalty grows with each token of the run; 1.75."
    )
    dry_allowed_length: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = Field(
        None, description="Shorter runs may be repeated; 2."
    )
    dry_range: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = Field(
        None, description="How many of the last tokens are looked at; 0: all."
    )
    dry_sequence_breakers: Annotated[list[Word], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="Strings that end a run; a line break, a colon, a quotation mark and an asterisk."
    )
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = Field(
        None, description="No run of so many tokens occurs twice, the prompt included; 0: off."
    )
    logits_processors: Annotated[dict[Label, dict[str, Any]], Field(max_length=_MAX_STOPS)] | None = Field(
        None, description="Processors of other packages that the operator enabled: arguments by name."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = Field(
        None, description="Divides logits of tokens in prompt or output; 1."
    )
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = Field(
        None, description="No end before so many tokens; 0."
    )
    ignore_eos: bool | None = Field(None, description="Do not end at the model's end tokens.")
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MAX_STOP_TOKENS)] | None = Field(
        None, description="Tokens that end the text."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; true.")
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        None, description="Only these may be chosen."
    )
    bad_words: Annotated[list[Word], Field(max_length=_MAX_BAD_WORDS, fail_fast=True)] | None = Field(
        None, description=f"Words that never occur in the output, at most {_MAX_BAD_WORDS}."
    )
    max_draft_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = Field(
        None, description="The most tokens drafted for this request in a step; 0: no speculation."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Log-probabilities of the prompt, with so many alternatives; not with stream."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_MAX_INT), AfterValidator(_not_zero)] | None = Field(
        None, description="Keep the last tokens of the prompt only, at least 1; -1: as many as fit."
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
