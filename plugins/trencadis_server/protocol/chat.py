"""The body and the answers of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from trencadis.records.sampling import MAX_LOGPROBS
from trencadis_server.protocol.answers import FinishReasonName, PromptLogprob, Usage
from trencadis_server.protocol.base import RequestModel, said_as
from trencadis_server.protocol.generation import GenerationRequest

__all__ = [
    "AssistantMessage",
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatMessage",
    "ChatRequest",
    "ChunkChoice",
    "Delta",
    "TokenLogprob",
    "TopLogprob",
]

_NEED_CONTENT = frozenset({"developer", "system", "user", "tool"})

# Any object is passed to the endpoint, which gives better errors about a part; the OpenAPI document promises these.
_PART_SCHEMAS = [
    {"type": "object", "properties": {"type": {"const": kind}, kind: {"type": "string"}}, "required": ["type", kind]}
    for kind in ("text", "refusal")
]
Parts = Annotated[
    list[dict[str, Any]], Field(fail_fast=True), WithJsonSchema({"type": "array", "items": {"anyOf": _PART_SCHEMAS}})
]


class ChatMessage(RequestModel):
    """One turn of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Annotated[str | Parts, said_as("text, or a list of parts")] | None = Field(
        None,
        validate_default=True,
        description='Text, or parts {"type": "text", "text": "..."} of it; only an assistant may have said nothing.',
    )
    name: str | None = Field(None, description="For templates that write it.")
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        None, description="What an earlier answer called."
    )
    tool_call_id: str | None = Field(None, description="Which call a tool answers.")
    reasoning: str | None = Field(None, description="For templates that write it, which get it under both names.")
    reasoning_content: str | None = Field(None, description="The older name of reasoning, which wins.")
    refusal: str | None = Field(None, description="Taken as the content if there is none.")
    function_call: dict[str, Any] | None = Field(None, description="For templates that write it.")
    audio: None = None
    annotations: list[Any] | None = Field(None, description="Ignored.")

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role")
        if content is None and role in _NEED_CONTENT:
            raise PydanticCustomError(
                "no_content", 'a message of the role "{role}" must have text, or a list of parts', {"role": role}
            )
        return content


class ChatRequest(GenerationRequest):
    """A conversation to answer."""

    endpoint: ClassVar[str] = "chat"

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] = Field(
        description="The conversation so far."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="The most tokens of a choice, for which the model must have room; by default as many as fit."
    )
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="The older name of max_completion_tokens, which wins."
    )
    logprobs: bool | None = Field(None, description="Log-probabilities of the output tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Alternatives at each token; needs logprobs."
    )
    add_generation_prompt: bool | None = Field(None, description="End with the opening of the assistant's turn; true.")
    continue_final_message: bool | None = Field(
        None, description="Continue the last message; add_generation_prompt must be false."
    )
    add_special_tokens: Literal[False] | None = Field(None, description="False only: the template writes them.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More names for the model's template.")
    echo: Literal[False] | None = Field(None, description="False only: a chat is not echoed.")

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a choice; None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_tokens_field(self) -> str:
        """The field that ``most_tokens`` is from; the newer one if neither was given."""
        return (
            "max_tokens"
            if self.max_completion_tokens is None and self.max_tokens is not None
            else "max_completion_tokens"
        )


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that could be at a position; ``bytes`` are exact, also for part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The token that is at a position, and the likeliest ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each output token."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer's text."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of n answers. ``stop_reason`` (vLLM's) is the stop string or stop token that ended it."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Addition of a chunk to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Addition of a chunk to one of n answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. With ``include_usage`` the usage is null in all but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
