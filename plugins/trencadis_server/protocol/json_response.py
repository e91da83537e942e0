"""msgspec records as JSON responses."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

__all__ = ["json_response"]


def json_response(answer: Any) -> Response:
    """Return a response with status 200. Pure."""
    return Response(msgspec.json.encode(answer), media_type="application/json")
