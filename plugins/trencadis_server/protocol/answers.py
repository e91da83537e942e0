"""Answers of the smaller endpoints, and parts common to several answers; msgspec types, which encode chunks quickly."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "ErrorAnswer",
    "ErrorDetails",
    "FinishReasonName",
    "ModelCard",
    "ModelList",
    "PromptLogprob",
    "RouteSummary",
    "ServerIndex",
    "Usage",
    "Version",
]


FinishReasonName = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of the prompt tokens; the last field is an extension, and is left out if it is 0.

    Attributes:
        cached_tokens: Number of tokens that were not computed for this request.
        audio_tokens: Always 0: prompts are text.
        approximate_tokens: Number of cached tokens whose KV is approximate.
    """

    cached_tokens: int
    audio_tokens: int = 0
    approximate_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of output tokens, all 0: drafts of the engine, which are counted in its metrics, are no predictions of the client."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request, all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(
        cls, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int, approximate_tokens: int = 0
    ) -> Usage:
        """Return the usage for these counts. Pure."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=cached_tokens, approximate_tokens=approximate_tokens or msgspec.UNSET
            ),
            completion_tokens_details=CompletionTokensDetails(),
        )


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate for a prompt token, as vLLM gives it."""

    logprob: float
    rank: int
    decoded_token: str


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer with a status from 400 on."""

    error: ErrorDetails


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A name that clients may ask for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    max_model_len: int
    owned_by: str = "trencadis"
    root: str | None = None
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All names that clients may ask for."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class RouteSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A route of the server."""

    method: str
    path: str
    summary: str


class ServerIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The server's version, models and routes."""

    name: Literal["trencadis"] = "trencadis"
    version: str
    models: list[str] | None
    """None where keys are needed: ``/v1/models`` has them for clients with a key."""
    docs: str = "/docs"
    openapi: str = "/openapi.json"
    routes: list[RouteSummary]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Version of this software."""

    version: str
