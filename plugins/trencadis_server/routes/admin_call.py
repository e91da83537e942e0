"""What requests to the administration have in common: who may ask, and for changes a JSON object."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis_server.config import LOOPBACK
from trencadis_server.errors import ApiError
from trencadis_server.middleware.respond import refuse
from trencadis_server.protocol.json_body import check_values, decode

__all__ = ["HostMiddleware", "check_content_type", "table_of"]

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d+)?", re.IGNORECASE)
_MAX_QUOTED = 100


class HostMiddleware:
    """Answers 403 unless a request names this machine as its host.

    A page whose name its owner lets point to 127.0.0.1 (DNS rebinding) may send a browser here and read the answers; the browser
    names the page's host then.

    Args:
        app: Gets the other requests.
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
    """Refuse a body that a web page can make a browser send without asking this server first.

    Raises:
        ApiError: 415.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "The body must be JSON: send content-type: application/json.", code="invalid_content_type")


def table_of(body: bytes) -> dict[str, Any]:
    """Return the body of a change, a JSON object. Pure.

    Raises:
        ApiError: 400: it is none, or has what cannot be sent to the engine.
    """
    table = decode(body)
    check_values(table)
    if not isinstance(table, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return table
