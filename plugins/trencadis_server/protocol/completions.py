"""The body and the answers of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from trencadis.records.sampling import MAX_LOGPROBS
from trencadis_server.protocol.answers import FinishReasonName, PromptLogprob, Usage
from trencadis_server.protocol.base import TokenIds, said_as
from trencadis_server.protocol.generation import GenerationRequest

__all__ = ["MAX_PROMPTS", "CompletionChoice", "CompletionLogprobs", "CompletionRequest", "Inputs", "TextCompletion"]

MAX_PROMPTS = 2048
"""The most texts in one request. Source: OpenAI's limit for the inputs of embeddings."""

_Ids = Annotated[TokenIds, Field(min_length=1)]
Inputs = Annotated[
    str
    | _Ids
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)],
    said_as(f"text, or token ids from 0, or a list of 1 to {MAX_PROMPTS} of one of these"),
]
"""One text or several, each as a string or as token ids."""


class CompletionRequest(GenerationRequest):
    """Texts to continue."""

    endpoint: ClassVar[str] = "completions"

    prompt: Inputs = Field(description="Text, token ids, or a list of these.")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(
        None,
        description="Generate so many, at least n, and answer the n with the largest mean log-probability; all count in the "
        "usage. With beam search its width. Above n not with stream.",
    )
    echo: bool | None = Field(None, description="The prompt before the text; with max_tokens 0 the prompt alone.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Log-probabilities of the tokens, with so many alternatives, by text; where several share a text, the chosen or "
        "else the likeliest has it, and each other is token_id: and its id.",
    )
    add_special_tokens: bool | None = Field(
        None, description="Encode with the tokens that the tokenizer adds, such as one for the beginning; true."
    )


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists with one entry for each token. The first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One of n continuations of one prompt, or the addition of a chunk to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, or one event of a stream: then the usage is null or missing in all but the last."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
