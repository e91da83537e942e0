"""``/v1/models`` and ``/version``, and checks of the model that a request names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import trencadis
from trencadis.errors import did_you_mean
from trencadis_server.context import ServerContext, context_of
from trencadis_server.errors import ApiError
from trencadis_server.protocol.answers import ModelCard, ModelList, Version
from trencadis_server.protocol.json_body import json_response
from trencadis_server.protocol.openapi import documented

if TYPE_CHECKING:
    from trencadis import AsyncLLM

__all__ = ["check_embeds", "check_generates", "check_model", "make_router"]


def make_router() -> APIRouter:
    """Return the routes. Pure."""
    router = APIRouter(tags=["models"])
    router.add_api_route("/v1/models", list_models, methods=["GET"], responses=documented(ModelList))
    # Hub ids have slashes.
    router.add_api_route("/v1/models/{name:path}", get_model, methods=["GET"], responses=documented(ModelCard))
    router.add_api_route("/version", get_version, methods=["GET"], responses=documented(Version))
    return router


async def list_models(request: Request) -> Response:
    """List the names that clients may ask for."""
    context = context_of(request)
    return json_response(ModelList(data=[_card(context, name) for name in context.model_names]))


async def get_model(request: Request, name: str) -> Response:
    """Describe one model."""
    context = context_of(request)
    check_model(context, name)
    return json_response(_card(context, name))


async def get_version() -> Response:
    """Say which version of the software serves."""
    return json_response(Version(version=trencadis.__version__))


def check_model(context: ServerContext, name: str | None) -> str:
    """Return the requested model name, or the first one if the request names none: all names are of the one served model. Pure.

    Source: ``_is_model_supported`` of vLLM's server, which takes an empty name as none, too.

    Raises:
        ApiError: No model of that name is served (404).
    """
    names = context.model_names
    if not name:
        return names[0]
    if name not in names:
        served = ", ".join(f'"{one}"' for one in names)
        raise ApiError(
            404,
            f"The model {name[:200]!r} does not exist.{did_you_mean(name[:200], names)} Served here: {served}.",
            param="model",
            code="model_not_found",
        )
    return name


def check_generates(llm: AsyncLLM) -> None:
    """Check that the model can continue a text.

    Raises:
        ApiError: The model is an encoder.
    """
    if not llm.model.generates:
        raise ApiError(
            400,
            f"This model ({llm.model.architecture}) is an encoder: it cannot generate text. Ask /v1/embeddings.",
            param="model",
            code="unsupported_model",
        )


def check_embeds(llm: AsyncLLM) -> None:
    """Check that the model can turn a text into a vector.

    Raises:
        ApiError: The model cannot embed texts.
    """
    if not llm.model.embedding_size:
        raise ApiError(
            400,
            f"This model ({llm.model.architecture}) cannot embed texts on this backend. Serve one that can.",
            param="model",
            code="unsupported_model",
        )


def _card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=context.created, max_model_len=context.llm.max_model_len, root=context.model_names[0]
    )
