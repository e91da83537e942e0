"""``/admin/scheduling`` and ``/admin/explain``: which policy schedules, another one in its place, and why a request waits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from trencadis.api import Config, Registry, ResolvedPlan, SchedulingChange, SchedulingInForce, resolve_change
from trencadis.errors import ConfigError, PluginError, RequestError, TrencadisError
from trencadis_server.context import ServerContext
from trencadis_server.errors import ApiError
from trencadis_server.routes.admin_call import check_content_type, table_of

if TYPE_CHECKING:
    from trencadis import AsyncLLM

__all__ = ["PlanInForce", "scheduling_router"]

logger = logging.getLogger("trencadis.server")

_SOURCE = "POST /admin/scheduling"


class PlanInForce:
    """The plan as the administration shows it: the configuration's, with the scheduling of the engine that serves.

    An engine that was opened again has the configuration's scheduling: that is what the operator wrote.

    Args:
        config: As the server runs it.
        plan: Of the configuration.
        registry: The plugins.
    """

    def __init__(self, config: Config, plan: ResolvedPlan, registry: Registry) -> None:
        self._written = self._present = SchedulingInForce.at_start(config, plan)
        self._registry = registry
        self._llm: AsyncLLM | None = None

    def of(self, llm: AsyncLLM | None) -> ResolvedPlan:
        """Return the plan of an engine; None: there is none."""
        return (self._present if llm is not None and llm is self._llm else self._written).plan

    def changed(self, llm: AsyncLLM, table: dict[str, Any]) -> None:
        """Note a change that an engine has made."""
        present = self._present if llm is self._llm else self._written
        try:
            self._present = resolve_change(present, self._registry, SchedulingChange.of(table, source=_SOURCE))
        except TrencadisError:
            logger.exception("The engine took a change of scheduling that the server cannot resolve.")
        self._llm = llm


def scheduling_router(context: ServerContext, plans: PlanInForce) -> APIRouter:
    """Return the routes.

    Args:
        context: Of the server.
        plans: Told of changes.
    """
    router = APIRouter()

    @router.get("/admin/scheduling", summary="The scheduling policy in force")
    async def show(request: Request) -> dict[str, Any]:
        """Policy, options, fallback, who was quarantined and why, and what the shadow would do otherwise."""
        return await _answered(context.llm.scheduling())

    @router.post("/admin/scheduling", summary="Another scheduling policy, or another shadow")
    async def change(request: Request) -> dict[str, Any]:
        """Put a policy in force between two steps: ``{"name": ..., "options": {...}, "shadow": ...}``, each optional.

        No request is lost, and none is computed again. The answer is that of GET, with what was in force before.
        """
        check_content_type(request)
        table, llm = table_of(await request.body()), context.llm
        answer = await _answered(llm.change_scheduling(table, source=_SOURCE))
        plans.changed(llm, table)
        return answer

    @router.get("/admin/explain/{request_id:path}", summary="Why a request was scheduled or not")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """What each of the last steps did with a request, and why; also after its end. Steps of equal outcome are one."""
        try:
            return await context.llm.explain(request_id)
        except RequestError as error:
            raise ApiError(404, str(error), code="unknown_request") from error

    return router


async def _answered(answer: Any) -> dict[str, Any]:
    """Return an engine's answer; what is wrong with the question is the caller's, in the words of the configuration.

    Raises:
        ApiError: 400.
    """
    try:
        found: dict[str, Any] = await answer
    except (ConfigError, PluginError, RequestError) as error:
        raise ApiError(400, str(error), code="invalid_scheduling") from error
    return found
