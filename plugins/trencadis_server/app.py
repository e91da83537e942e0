"""The application: routes, and around them the middlewares in this order.

request context (id, log, counters) ▶ CORS ▶ drain guard (shutting down) ▶ API keys ▶ body (size, time) ▶ HEAD ▶ routes
"""

from __future__ import annotations

import threading
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import trencadis
from trencadis_server.context import ServerContext
from trencadis_server.http_metrics import HttpMetrics
from trencadis_server.middleware.auth import ApiKeys, AuthMiddleware
from trencadis_server.middleware.body import BodyMiddleware
from trencadis_server.middleware.drain_guard import DrainGuard, DrainMiddleware
from trencadis_server.middleware.failures import add_handlers
from trencadis_server.middleware.request_context import RequestContextMiddleware
from trencadis_server.middleware.transfer_rejections import TransferRejectionMiddleware
from trencadis_server.routes import documents, health, metrics

__all__ = ["HeadMiddleware", "endpoint_routers", "make_app"]


def make_app(
    context: ServerContext,
    *,
    routers: tuple[APIRouter, ...] | None = None,
    gate: DrainGuard | None = None,
    http_metrics: HttpMetrics | None = None,
) -> FastAPI:
    """Return the ASGI application of a server.

    Args:
        context: Objects that the endpoints need; found at ``app.state.context``.
        routers: Routers of the endpoints; None: all endpoints.
        gate: Closed when the server shuts down; None: never closed.
        http_metrics: Counters of the HTTP side; None: new ones.

    Raises:
        ConfigValueError: ``server.api_keys`` has an invalid entry.
    """
    gate = gate or DrainGuard()
    http_metrics = http_metrics or HttpMetrics()
    app = FastAPI(
        title="Trencadís",
        version=trencadis.__version__,
        summary="An OpenAI-compatible server.",
        docs_url=None,  # FastAPI's page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    all_routers = [
        *(endpoint_routers() if routers is None else routers),
        health.make_router(gate),
        metrics.make_router(http_metrics),
    ]
    all_routers.append(documents.make_router(all_routers))
    for router in all_routers:
        app.include_router(router)
    paths = frozenset(route.path for router in all_routers for route in router.routes if isinstance(route, APIRoute))
    add_handlers(app)
    _add_middlewares(app, context, gate, http_metrics, paths)
    _tidy_openapi(app)
    return app


def endpoint_routers() -> tuple[APIRouter, ...]:
    """Return new routers of all endpoints."""
    from trencadis_server.routes import chat, completions, embeddings, models, tokenization

    return tuple(module.make_router() for module in (chat, completions, embeddings, models, tokenization))


def _add_middlewares(
    app: FastAPI, context: ServerContext, gate: DrainGuard, http_metrics: HttpMetrics, paths: frozenset[str]
) -> None:
    """Put middlewares around the routes; the one added last is the outermost."""
    config = context.config
    app.add_middleware(HeadMiddleware)
    app.add_middleware(TransferRejectionMiddleware, context=context)
    app.add_middleware(
        BodyMiddleware,
        max_bytes=config.max_body_bytes,
        timeout_s=config.body_timeout_s,
        max_values=config.max_body_values,
        threads=context.parser,
    )
    app.add_middleware(AuthMiddleware, keys=ApiKeys(config.api_keys))
    app.add_middleware(DrainMiddleware, gate=gate)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "Retry-After"],
        )
    app.add_middleware(RequestContextMiddleware, metrics=http_metrics, clock=context.clock, paths=paths)


def _tidy_openapi(app: FastAPI) -> None:
    """Remove FastAPI's own answer to invalid requests from the OpenAPI document, since it is never sent."""
    generate = app.openapi
    lock = threading.Lock()

    def openapi() -> dict[str, Any]:
        with lock:
            return app.openapi_schema or make()

    def make() -> dict[str, Any]:
        document = generate()
        for operations in document.get("paths", {}).values():
            for operation in operations.values():
                operation.get("responses", {}).pop("422", None)
        schemas = document.get("components", {}).get("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        if app.state.context.config.api_keys:
            document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


class HeadMiddleware:
    """Lets routes answer HEAD as they answer GET.

    Source: RFC 9110, section 9.1: every general-purpose server supports both.

    Args:
        app: Application that it wraps; it sees GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        seen: Scope = {**scope, "method": "GET"}
        try:
            await self._app(seen, receive, send_head)
        finally:
            if "route" in seen:  # the request is counted by its route
                scope["route"] = seen["route"]
