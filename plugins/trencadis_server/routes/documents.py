"""``/``: what is served here. ``/docs``: the API in a browser, where requests can be tried.

The page of ``/docs`` and all it loads come from this server: the files of Swagger UI from the package ``fastapi-offline``, and a script
of one line that starts it. A header keeps the browser from loading or running anything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import FileResponse, Response

import trencadis
from trencadis_server.context import context_of
from trencadis_server.protocol.answers import RouteSummary, ServerIndex
from trencadis_server.protocol.json_body import json_response
from trencadis_server.protocol.openapi import documented

__all__ = ["make_router"]

_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
"""Files of Swagger UI, with their types; no other file can be requested."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Trencadís: HTTP API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon.png">
</head>
<body>
<div id="swagger-ui"></div>
<noscript>This page needs JavaScript. <a href="openapi.json">openapi.json</a> has the same, and <a href="./">/</a> lists the routes.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
"""Addresses are relative, so that a proxy may put a path before them."""

# Without validatorUrl the page would ask a server of its makers about the document.
_START = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null});\n'

_SECURITY_HEADERS = {
    # Swagger UI sets styles of elements and has pictures in its style sheet.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_router(others: Iterable[APIRouter]) -> APIRouter:
    """Return the routes. Pure.

    Args:
        others: Routers of the routes that ``/`` lists.
    """
    summaries = list(_summaries(others))

    async def show_index(request: Request) -> Response:
        """Say what is served here: version, models and routes; JSON if the client asks for it, else text."""
        context = context_of(request)
        names = None if context.config.api_keys else list(context.model_names)
        index = ServerIndex(version=trencadis.__version__, models=names, routes=summaries)
        if _prefers_json(request.headers.get("accept", "")):
            return json_response(index)
        return Response(_index_text(index), media_type="text/plain; charset=utf-8")

    router = APIRouter(tags=["documents"])
    answers = documented(ServerIndex)
    answers[200]["content"]["text/plain"] = {"schema": {"type": "string"}}
    router.add_api_route("/", show_index, methods=["GET"], responses=answers, response_class=Response)
    router.add_api_route("/docs", show_page, methods=["GET"], include_in_schema=False)
    router.add_api_route("/docs/start.js", show_start, methods=["GET"], include_in_schema=False)
    for name in _FILES:
        router.add_api_route(f"/docs/{name}", _shows_file(name), methods=["GET"], include_in_schema=False)
    return router


async def show_page() -> Response:
    """Show the API in a browser."""
    return Response(_PAGE, media_type="text/html", headers=_SECURITY_HEADERS)


async def show_start() -> Response:
    """Send the script that starts Swagger UI."""
    return Response(_START, media_type="text/javascript", headers=_SECURITY_HEADERS)


def _shows_file(name: str) -> Any:
    path = str(resources.files("fastapi_offline").joinpath("static", name))

    async def show_file() -> Response:
        headers = {**_SECURITY_HEADERS, "Cache-Control": "max-age=3600"}
        return FileResponse(path, media_type=_FILES[name], headers=headers)

    return show_file


def _summaries(routers: Iterable[APIRouter]) -> Iterable[RouteSummary]:
    for route in (route for router in routers for route in router.routes):
        if isinstance(route, APIRoute) and route.include_in_schema:
            summary = route.summary or route.description.partition("\n")[0]
            for method in sorted(route.methods or ()):
                yield RouteSummary(method=method, path=route.path_format, summary=summary)


def _index_text(index: ServerIndex) -> str:
    models = (
        "its models are named at /v1/models, which needs a key" if index.models is None else ", ".join(index.models)
    )
    names = [f"{route.method} {route.path.replace('{name}', 'NAME')}" for route in index.routes]
    width = max(map(len, names), default=0)
    lines = [f"Trencadís {index.version}: {models}", ""]
    lines += [f"  {name:{width}}  {route.summary}" for name, route in zip(names, index.routes, strict=True)]
    return "\n".join([*lines, "", f"In a browser: {index.docs}. As OpenAPI: {index.openapi}.", ""])


def _prefers_json(accept: str) -> bool:
    """Return whether a client prefers JSON to text. Pure.

    Args:
        accept: Value of the header ``Accept``; empty: anything.
    """
    weights: dict[str, float] = {}
    for part in accept.split(","):
        kind, _, parameters = part.partition(";")
        weights[kind.strip().lower()] = _weight(parameters)
    return weights.get("application/json", 0.0) > max(weights.get(kind, 0.0) for kind in ("text/plain", "text/html"))


def _weight(parameters: str) -> float:
    """Return the weight ``q`` of a part of an ``Accept`` header; 0 if it cannot be read. Pure."""
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
