"""Administration pages, on a loopback port of their own: plugins, configuration, scheduling and role."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import attrs
from fastapi import APIRouter, FastAPI, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

import trencadis
from trencadis.api import (
    Config,
    Registry,
    ResolvedConfig,
    ResolvedPlan,
    SchedulingChange,
    SchedulingInForce,
    explain,
    resolve_change,
    rows_of,
)
from trencadis.errors import ConfigError, EngineEndedError, PluginError, RequestError, TrencadisError
from trencadis_server.config import LOOPBACK
from trencadis_server.context import ServerContext
from trencadis_server.errors import ApiError
from trencadis_server.http_metrics import HttpMetrics
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.middleware.auth import ApiKeys, AuthMiddleware
from trencadis_server.middleware.body import BodyMiddleware
from trencadis_server.middleware.failures import add_handlers, refuse
from trencadis_server.middleware.request_context import RequestContextMiddleware
from trencadis_server.protocol.json_body import check_values, decode

if TYPE_CHECKING:
    from trencadis import AsyncLLM

__all__ = [
    "HostMiddleware",
    "NoKeyMiddleware",
    "PlanInForce",
    "check_content_type",
    "make_admin_app",
    "replicas_router",
    "role_router",
    "scheduling_router",
    "table_of",
]

_MAX_BODY_BYTES = 2**16

logger = logging.getLogger("trencadis.server")

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d+)?", re.IGNORECASE)
_MAX_QUOTED = 100
_SOURCE = "POST /admin/scheduling"


def make_admin_app(
    context: ServerContext, *, supervisor: Supervisor, registry: Registry, plan: ResolvedPlan, resolved: ResolvedConfig
) -> FastAPI:
    """Return the administration application. It shows no secrets, and can change only scheduling and the engine's role.

    Requests must name this machine as their host, and have the key ``server.admin_key`` if it is set. The keys of
    clients are not valid here: if there are any and no ``server.admin_key``, every request is refused.

    Args:
        context: Context of the server.
        supervisor: Owner of the engine.
        registry: Registry of the plugins.
        plan: Resolved plan, with the component of each noun.
        resolved: Configuration with its sources.
    """
    app = FastAPI(title="Trencadís administration", version=trencadis.__version__, docs_url=None, redoc_url=None)
    add_handlers(app)
    app.add_middleware(BodyMiddleware, max_bytes=_MAX_BODY_BYTES, timeout_s=context.config.body_timeout_s)
    if context.config.lacks_admin_key:
        app.add_middleware(NoKeyMiddleware)
    else:
        own = context.config.admin_key
        app.add_middleware(AuthMiddleware, keys=ApiKeys([f"admin:{own}"] if own else []))
    app.add_middleware(HostMiddleware)
    app.add_middleware(RequestContextMiddleware, metrics=HttpMetrics(), clock=context.clock)
    plans = PlanInForce(resolved.config, plan, registry)
    app.include_router(scheduling_router(context, plans))
    app.include_router(role_router(context))
    app.include_router(replicas_router(context))

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


class NoKeyMiddleware:
    """Answers 403: clients have keys, and the administration has none of its own.

    Args:
        app: Application that it wraps; it gets no HTTP request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            "The administration has no key: keys of server.api_keys do not open it. Set server.admin_key and start the server again.",
            code="no_admin_key",
        )
        await refuse(scope, receive, send, error)


class HostMiddleware:
    """Answers 403 unless the request's host is this machine.

    With DNS rebinding, a web page whose name resolves to 127.0.0.1 may make a browser send requests here and read the
    answers; these requests name the page's host.

    Args:
        app: Application that it wraps; it gets the other requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
            if match is None or (match[1] or match[2]).lower() not in LOOPBACK:
                given = ", ".join(hosts)[:_MAX_QUOTED]
                error = ApiError(
                    403,
                    f"The administration answers as 127.0.0.1, [::1] or localhost, not as host {given!a}.",
                    code="wrong_host",
                )
                await refuse(scope, receive, send, error)
                return
        await self._app(scope, receive, send)


def check_content_type(request: Request) -> None:
    """Refuse a content type that a web page can send across origins without a preflight request.

    Raises:
        ApiError: 415: the content type is another.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "The body must be JSON: send content-type: application/json.", code="invalid_content_type")


def table_of(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Pure.

    Raises:
        ApiError: 400: the body is no JSON object, or has a value that cannot be sent to the engine.
    """
    table = decode(body)
    check_values(table)
    if not isinstance(table, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return table


def role_router(context: ServerContext) -> APIRouter:
    """Return the routes.

    Args:
        context: Context of the server.
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


def replicas_router(context: ServerContext) -> APIRouter:
    """Return the routes.

    Args:
        context: Context of the server.
    """
    router = APIRouter()

    @router.get("/admin/replicas", summary="The replicas")
    async def show(request: Request) -> dict[str, Any]:
        """The state of each replica, its load, and how often it was started again; 400 with one engine."""
        return await _of_replicas(context.llm.replicas())

    @router.post("/admin/replicas/{replica:int}/restart", summary="Start a replica again")
    async def restart(request: Request, replica: int) -> dict[str, Any]:
        """Start a replica again when its requests have ended; meanwhile others take the new ones. The answer comes at once."""
        check_content_type(request)
        return await _of_replicas(context.llm.restart_replica(replica))

    return router


async def _of_replicas(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Return an answer about replicas.

    Raises:
        ApiError: 400: the engine refuses the request.
    """
    try:
        return await answer
    except RequestError as error:
        raise ApiError(400, str(error), code="invalid_replica") from error


class PlanInForce:
    """The plan shown by the administration: the configured one, with the present scheduling of the engine.

    An engine that was started again has the scheduling of the configuration.

    Args:
        config: Configuration as the server runs it.
        plan: Resolved plan of the configuration.
        registry: Registry of the plugins.
    """

    def __init__(self, config: Config, plan: ResolvedPlan, registry: Registry) -> None:
        self._written = self._present = SchedulingInForce.at_start(config, plan)
        self._registry = registry
        self._llm: AsyncLLM | None = None

    def of(self, llm: AsyncLLM | None) -> ResolvedPlan:
        """Return the plan of an engine; None: of the configuration."""
        return (self._present if llm is not None and llm is self._llm else self._written).plan

    def changed(self, llm: AsyncLLM, table: dict[str, Any]) -> None:
        """Record a change of scheduling that an engine has made."""
        present = self._present if llm is self._llm else self._written
        try:
            self._present = resolve_change(present, self._registry, SchedulingChange.of(table, source=_SOURCE))
        except TrencadisError:
            logger.exception("The engine took a change of scheduling that the server cannot resolve.")
        self._llm = llm


def scheduling_router(context: ServerContext, plans: PlanInForce) -> APIRouter:
    """Return the routes.

    Args:
        context: Context of the server.
        plans: Plans, which record each change.
    """
    router = APIRouter()

    @router.get("/admin/scheduling", summary="The scheduling policy in force")
    async def show(request: Request) -> dict[str, Any]:
        """Policy, options, fallback, who was quarantined and why, and what the shadow would do otherwise."""
        return await _answered(context.llm.scheduling())

    @router.post("/admin/scheduling", summary="Another scheduling policy, or another shadow")
    async def change(request: Request) -> dict[str, Any]:
        """Put a policy in force between two steps: ``{"name": ..., "options": {...}, "shadow": ...}``, each optional.

        Names are those of registered components; an import path is followed only if the configuration has it. No request is lost, and none is computed again. The answer is that of GET, with what was in force before.
        """
        check_content_type(request)
        table, llm = table_of(await request.body()), context.llm
        answer = await _answered(llm.change_scheduling(table, source=_SOURCE))
        plans.changed(llm, table)
        return answer

    @router.post("/admin/flight-record", summary="Write what the engine did in its last steps")
    async def record(request: Request) -> dict[str, Any]:
        """Write a flight record on the engine's machine, for trencadis replay; the answer has its paths, one for each replica."""
        check_content_type(request)
        try:
            return await context.llm.flight_record()
        except RequestError as error:
            raise ApiError(400, str(error), code="no_flight_record") from error

    @router.get("/admin/explain/{request_id:path}", summary="Why a request was scheduled or not")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """What each of the last steps did with a request, and why; also after its end. Steps of equal outcome are one."""
        try:
            return await context.llm.explain(request_id)
        except RequestError as error:
            raise ApiError(404, str(error), code="unknown_request") from error

    return router


async def _answered(answer: Any) -> dict[str, Any]:
    """Return an engine's answer; an invalid change becomes status 400 with the configuration's message.

    Raises:
        ApiError: 400: the change is invalid.
    """
    try:
        found: dict[str, Any] = await answer
    except (ConfigError, PluginError, RequestError) as error:
        raise ApiError(400, str(error), code="invalid_scheduling") from error
    return found
