"""``/admin/role``: whether an engine computes prompts for others, generates, or both; changed while it serves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from trencadis.errors import RequestError
from trencadis_server.context import ServerContext
from trencadis_server.errors import ApiError
from trencadis_server.routes.admin_call import check_content_type, table_of

__all__ = ["role_router"]


def role_router(context: ServerContext) -> APIRouter:
    """Return the routes.

    Args:
        context: Of the server.
    """
    router = APIRouter()

    @router.get("/admin/role", summary="The role of the engine")
    async def show(request: Request) -> dict[str, Any]:
        """The role in force, and how many requests are live: after a change, those that came before run to their end."""
        return await context.llm.role()

    @router.post("/admin/role", summary="Another role")
    async def change(request: Request) -> dict[str, Any]:
        """Take another role between two steps: ``{"role": "prefill"}``, ``decode`` or ``both``.

        Requests that are here run to their end; newcomers that the new role does not take are answered with 503.
        """
        check_content_type(request)
        table = table_of(await request.body())
        try:
            return await context.llm.set_role(str(table.get("role")))
        except RequestError as error:
            raise ApiError(400, str(error), code="invalid_role") from error

    return router
