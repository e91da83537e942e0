"""The bodies of ``POST /tokenize`` and ``POST /detokenize``, by vLLM's names, and their answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from trencadis_server.protocol.base import EndpointRequest, TokenIds
from trencadis_server.protocol.chat import ChatMessage

__all__ = ["DetokenizeRequest", "Detokenized", "TokenizeRequest", "Tokenized"]


class TokenizeRequest(EndpointRequest):
    """A text or a conversation to turn into token ids."""

    endpoint: ClassVar[str] = "tokenize"

    prompt: str | None = Field(None, description="A text; this or messages.")
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="A conversation."
    )
    add_special_tokens: bool | None = Field(
        None, description="With the tokens that the tokenizer adds; true for a prompt, false for messages."
    )
    return_token_strs: bool | None = Field(None, description="The text of each token, too.")
    add_generation_prompt: bool | None = Field(None, description="End with the opening of the assistant's turn; true.")
    continue_final_message: bool | None = Field(None, description="Leave the last message open.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More names for the model's template.")


class DetokenizeRequest(EndpointRequest):
    """Token ids to turn into text."""

    endpoint: ClassVar[str] = "detokenize"

    tokens: TokenIds = Field(description="Token ids; those that the tokenizer does not know have no text.")


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Text of token ids."""

    prompt: str
