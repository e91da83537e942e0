"""The body and the answers of ``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field

from trencadis_server.protocol.base import EndpointRequest
from trencadis_server.protocol.completions import Inputs

__all__ = ["EmbeddingItem", "EmbeddingList", "EmbeddingUsage", "EmbeddingsRequest"]


class EmbeddingsRequest(EndpointRequest):
    """Texts to turn into vectors."""

    endpoint: ClassVar[str] = "embeddings"

    input: Inputs = Field(description="Text, token ids, or a list of these.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or little-endian float32 in base64; float."
    )
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = Field(
        None, description="The model's own, or left out: no model here says that its vectors may be shortened."
    )
    user: str | None = Field(None, description="Ignored: texts are embedded in order of arrival.")
    add_special_tokens: bool | None = Field(None, description="Encode with the tokens that the tokenizer adds; true.")


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each text, in order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
