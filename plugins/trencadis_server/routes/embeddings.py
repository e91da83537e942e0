"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from trencadis_server.context import context_of
from trencadis_server.errors import SERVER_ERROR, ApiError
from trencadis_server.generation.connection import answer_while_connected
from trencadis_server.generation.prompts import TokenIds, check_room, encode_inputs
from trencadis_server.protocol.embeddings import EmbeddingItem, EmbeddingList, EmbeddingsRequest, EmbeddingUsage
from trencadis_server.protocol.json_body import JsonRoute, json_response
from trencadis_server.protocol.openapi import documented
from trencadis_server.routes.models import check_embeds, check_model

if TYPE_CHECKING:
    from trencadis import AsyncLLM
    from trencadis.records import Embedding
    from trencadis_server.context import ServerContext

__all__ = ["make_router"]

_PARAM = "input"
_NUMBERS_PER_CHARACTER = 4
"""Numbers that are written in the time in which a character is encoded."""
_CHARACTERS_PER_VECTOR = 8
"""Characters that are encoded in the time that a vector takes besides its numbers."""


def make_router() -> APIRouter:
    """Return the route. Pure."""
    router = APIRouter(tags=["embeddings"], route_class=JsonRoute)
    router.add_api_route("/v1/embeddings", create_embeddings, methods=["POST"], responses=documented(EmbeddingList))
    return router


async def create_embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Turn texts into vectors."""
    context = context_of(request)
    llm = context.ready_llm
    model = check_model(context, body.model)
    check_embeds(llm)
    _check_dimensions(body.dimensions, llm.model.embedding_size)
    prompts = await encode_inputs(
        body.input,
        llm=llm,
        context=context,
        caller=request.state.caller,
        add_special_tokens=body.add_special_tokens is None or body.add_special_tokens,
        is_cut=False,
        num_output=0,
        param=_PARAM,
    )
    check_room(prompts, max_model_len=llm.max_model_len, num_output=0, param=_PARAM)
    is_base64 = body.encoding_format == "base64"
    return await answer_while_connected(
        request, _embed(context, llm, prompts, caller=request.state.caller, model=model, is_base64=is_base64)
    )


async def _embed(
    context: ServerContext, llm: AsyncLLM, prompts: list[TokenIds], *, caller: str, model: str, is_base64: bool
) -> Response:
    with context.admission.hold(sum(map(len, prompts)), num_requests=len(prompts), caller=caller):
        embeddings = await llm.embed(prompts)
    num_numbers = sum(len(embedding.vector) for embedding in embeddings)
    return await context.writer.run(
        lambda: _answer(embeddings, model=model, is_base64=is_base64),
        num_characters=num_numbers // _NUMBERS_PER_CHARACTER + len(embeddings) * _CHARACTERS_PER_VECTOR,
        caller=caller,
    )


def _answer(embeddings: Sequence[Embedding], *, model: str, is_base64: bool) -> Response:
    """Return the answer; vectors are encoded one by one, since all at once would be one long call. Pure."""
    data = [
        cast(
            "EmbeddingItem",
            msgspec.Raw(
                msgspec.json.encode(EmbeddingItem(index=index, embedding=_vector(embedding, is_base64=is_base64)))
            ),
        )
        for index, embedding in enumerate(embeddings)
    ]
    num_tokens = sum(embedding.num_tokens for embedding in embeddings)
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return json_response(EmbeddingList(data=data, model=model, usage=usage))


def _vector(embedding: Embedding, *, is_base64: bool) -> list[float] | str:
    if embedding.error:
        raise ApiError(500, f"A text could not be embedded: {embedding.error}", SERVER_ERROR, None, "engine_error")
    if is_base64:
        return base64.b64encode(embedding.vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = embedding.vector.tolist()
    return numbers


def _check_dimensions(asked: int | None, size: int) -> None:
    if asked is not None and asked != size:
        raise ApiError(
            400,
            f"dimensions = {asked}: this model's vectors have {size} numbers, and it does not say that they may be shortened. "
            f"Leave dimensions out, or ask for {size}.",
            param="dimensions",
        )
