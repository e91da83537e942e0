"""What every change through the administration has in common: who may ask, and a JSON object."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from trencadis.server.errors import ApiError

__all__ = ["check_caller", "table_of"]

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def check_caller(request: Request) -> None:
    """Refuse what a web page can make a browser send to this machine: pages know neither JSON without leave nor our name.

    Raises:
        ApiError: 403 or 415.
    """
    host = request.url.hostname or ""
    if host not in _LOOPBACK:
        raise ApiError(
            403, f"The administration is asked as 127.0.0.1 or localhost, not as {host!a}.", code="wrong_host"
        )
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "The body must be JSON: send content-type: application/json.", code="invalid_content_type")


def table_of(body: bytes) -> dict[str, Any]:
    """Return the body of a change, a JSON object. Pure.

    Raises:
        ApiError: 400: it is none.
    """
    try:
        table = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(table, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return table
