"""Answers of ``POST /v1/completions``: whole, and as chunks of a stream, which differ in their finish reasons only."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trencadis_server.protocol.answers import PromptLogprob, Usage
from trencadis_server.protocol.chat_answers import FinishReasonName

__all__ = ["CompletionChoice", "CompletionLogprobs", "TextCompletion"]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists with one entry for each token. The first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of n continuations of one prompt, or what a chunk adds to it."""

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
