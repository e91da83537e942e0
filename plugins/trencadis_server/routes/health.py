"""``/health`` and ``/ready``: whether the server can take traffic, with the reason if not."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from trencadis.errors import EngineEndedError, TrencadisError
from trencadis_server.context import ServerContext, context_of
from trencadis_server.errors import EngineUnavailableError, as_api_error
from trencadis_server.middleware.drain_guard import DrainGuard, draining_error

__all__ = ["make_router"]


def make_router(gate: DrainGuard) -> APIRouter:
    """Return the routes.

    Args:
        gate: Drain guard, which says whether the server shuts down.
    """
    router = APIRouter(tags=["operate"])

    @router.get("/health", summary="Is there an engine that serves?")
    async def health(request: Request) -> JSONResponse:
        """200 while an engine serves and makes progress; else 503, the state and the reason."""
        return _answer(obstacle(context_of(request), gate))

    @router.get("/ready", summary="May traffic come?")
    async def ready(request: Request) -> JSONResponse:
        """200 while the engine is warm and makes progress, and the server is not shutting down; else 503, the state and the reason.

        ``off`` lists components that are not called at the moment, such as a policy that was too slow; the engine serves without them.
        """
        context = context_of(request)
        error = obstacle(context, gate)
        return _answer(error, off=[] if error is not None else await _switched_off(context))

    return router


def obstacle(context: ServerContext, gate: DrainGuard) -> EngineEndedError | None:
    """Return the error because of which the server cannot serve at the moment, or None. Pure."""
    if gate.is_draining:
        return draining_error()
    try:
        llm = context.ready_llm
    except EngineEndedError as error:
        return error
    return None if llm.is_alive else EngineEndedError(llm.failure)


async def _switched_off(context: ServerContext) -> list[dict[str, Any]]:
    """Return components that are off; none if the engine does not respond, such as in a long step."""
    try:
        rows: list[dict[str, Any]] = (await context.ready_llm.switched_off())["components"]
    except TrencadisError:
        return []
    return rows


def _answer(error: EngineEndedError | None, *, off: list[dict[str, Any]] | None = None) -> JSONResponse:
    if error is None:
        return JSONResponse({"status": "ok", **({"off": off} if off else {})})
    state = error.state if isinstance(error, EngineUnavailableError) else "ended"
    api_error = as_api_error(error)
    return JSONResponse(
        {"status": state, "reason": str(error), **api_error.body()}, status_code=503, headers=dict(api_error.headers)
    )
