"""The administration on a loopback port of its own: what is installed and active, who set which value, and scheduling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from fastapi import FastAPI, Request

import trencadis
from trencadis.api import Registry, ResolvedConfig, ResolvedPlan, explain, rows_of
from trencadis.errors import EngineEndedError
from trencadis_server.context import ServerContext
from trencadis_server.http_metrics import HttpMetrics
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.middleware.auth import ApiKeys, AuthMiddleware
from trencadis_server.middleware.body import BodyMiddleware
from trencadis_server.middleware.failures import add_handlers
from trencadis_server.middleware.request_context import RequestContextMiddleware
from trencadis_server.routes.admin_call import HostMiddleware
from trencadis_server.routes.admin_role import role_router
from trencadis_server.routes.admin_scheduling import PlanInForce, scheduling_router

if TYPE_CHECKING:
    from trencadis import AsyncLLM

__all__ = ["make_admin_app"]

_MAX_BODY_BYTES = 2**16


def make_admin_app(
    context: ServerContext, *, supervisor: Supervisor, registry: Registry, plan: ResolvedPlan, resolved: ResolvedConfig
) -> FastAPI:
    """Return the application of the administration pages. They show no secret, and change nothing but scheduling and the engine's role.

    Requests must name this machine as their host, and have a key if one is configured: ``server.admin_key``, else any of
    ``server.api_keys``.

    Args:
        context: Of the server.
        supervisor: Has the engine.
        registry: The plugins.
        plan: Which component serves each noun.
        resolved: The configuration with its sources.
    """
    app = FastAPI(title="Trencadís administration", version=trencadis.__version__, docs_url=None, redoc_url=None)
    add_handlers(app)
    app.add_middleware(BodyMiddleware, max_bytes=_MAX_BODY_BYTES, timeout_s=context.config.body_timeout_s)
    config = context.config
    keys = [f"admin:{config.admin_key}"] if config.admin_key else config.api_keys
    app.add_middleware(AuthMiddleware, keys=ApiKeys(keys))
    app.add_middleware(HostMiddleware)
    app.add_middleware(RequestContextMiddleware, metrics=HttpMetrics(), clock=context.clock)
    plans = PlanInForce(resolved.config, plan, registry)
    app.include_router(scheduling_router(context, plans))
    app.include_router(role_router(context))

    @app.get("/admin/plugins", summary="Components, plan, configuration and engine")
    async def show(request: Request) -> dict[str, Any]:
        """Every installed component, the resolved plan, the configuration with its sources, and the engine's state.

        The plan's hash is the engine's: some choices wait for the backend.
        """
        present = plans.of(_engine_of(context))
        return {
            "version": trencadis.__version__,
            "plan": _plan(present),
            "components": [{**attrs.asdict(row), "active": row.role == "active"} for row in rows_of(registry, present)],
            "config": [attrs.asdict(row) for row in explain(resolved)],
            "engine": _engine(context, supervisor),
            "server": _server(context),
        }

    return app


def _engine_of(context: ServerContext) -> AsyncLLM | None:
    try:
        return context.llm
    except EngineEndedError:
        return None


def _plan(plan: ResolvedPlan) -> dict[str, Any]:
    return {
        "choices": {noun: choice.component.name for noun, choice in plan.choices.items()},
        "fallbacks": {noun: choice.component.name for noun, choice in plan.fallbacks.items()},
        "by_layout": {layout: choice.component.name for layout, choice in plan.by_layout.items()},
        "observers": [choice.component.name for choice in plan.observers],
        "shadow": None if plan.shadow is None else plan.shadow.component.name,
    }


def _engine(context: ServerContext, supervisor: Supervisor) -> dict[str, Any]:
    state: dict[str, Any] = {"num_restarts": supervisor.num_restarts}
    try:
        llm = context.llm
    except EngineEndedError as error:
        return state | {"serves": False, "reason": str(error)}
    return state | {
        "serves": True,
        "model": attrs.asdict(llm.model),
        "max_model_len": llm.max_model_len,
        "plan_hash": llm.plan_hash,
        "num_live_requests": llm.num_live,
    }


def _server(context: ServerContext) -> dict[str, Any]:
    admission = context.admission
    return {
        "model_names": list(context.model_names),
        "started_at": context.created,
        "num_requests": getattr(admission, "num_requests", None),
        "num_waiting_tokens": getattr(admission, "num_waiting_tokens", None),
    }
