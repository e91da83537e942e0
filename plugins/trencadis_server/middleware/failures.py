"""Error answers in OpenAI's format: exception handlers for routes, and ASGI messages for middlewares.

No error text of FastAPI or Starlette reaches a client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from trencadis.errors import TrencadisError, did_you_mean
from trencadis_server.errors import ApiError, as_api_error
from trencadis_server.routes.other_servers import instead_of

__all__ = ["add_handlers", "error_headers", "has_body", "refuse", "send_error", "validation_error"]

_NO_OBJECT = frozenset({"model_attributes_type", "model_type", "dict_type"})
"""Pydantic's error types for a body that is an array, a string, a number or null."""

_KEY = "[key]"
"""Part that pydantic puts after a name if the name itself is at fault."""

_MAX_QUOTED = 40
_MAX_PATH = 200
_LINGER_S = 2.0
"""Time for which a refused client may go on sending: closing at once would destroy the answer that it has not read."""
_PACE_S = 0.01
"""Pause between two pieces that a refused client goes on sending: it limits the cost for the server to some 30 MB/s."""


def add_handlers(app: FastAPI) -> None:
    """Add exception handlers that answer every error of a route in OpenAI's format."""
    app.add_exception_handler(RequestValidationError, _handler(_of_validation))
    app.add_exception_handler(HTTPException, _handler(_of_http))
    app.add_exception_handler(TrencadisError, _handler(_of_any))
    app.add_exception_handler(ApiError, _handler(_of_any))


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the API error for pydantic's errors; it names the first invalid field. Pure.

    Args:
        errors: ``ValidationError.errors()`` of pydantic or FastAPI.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        position = next((part for part in first["loc"] if isinstance(part, int)), 0)
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The body is not valid JSON: {reason} at character {position}.", code="invalid_json")
    path = _path(first["loc"])
    if first["type"] in _NO_OBJECT and not path:
        message = "The body must be a JSON object."
    elif first["type"] == "missing":
        message = f"{path}: is missing." if path else "The request has no body; it takes a JSON object."
    else:
        message = f"{path}{_value(first)}: {_sentence(first['msg'])}" if path else _sentence(first["msg"])
    more = len({_path(error["loc"]) for error in errors} - {path})
    if more:
        message += f" There are faults in {more} more place{'s' if more > 1 else ''}."
    return ApiError(400, message, param=path or None)


def _value(error: Mapping[str, Any]) -> str:
    """Return an invalid value for quoting in a message, or nothing if it is long. Pure."""
    value = error.get("input", ())
    if not isinstance(value, str | int | float | None) or (isinstance(value, str) and len(value) > _MAX_QUOTED):
        return ""
    shown = json.dumps(value)
    return f" = {shown}" if len(shown) <= _MAX_QUOTED else ""


def _handler(convert: Callable[[Request, Any], ApiError]) -> Callable[[Request, Exception], Response]:
    def handle(request: Request, error: Exception) -> Response:
        found = convert(request, error)
        headers = dict(found.headers)
        return Response(found.encoded(), status_code=found.status, headers=headers, media_type="application/json")

    return handle


def _of_any(request: Request, error: Exception) -> ApiError:
    return as_api_error(error, request_id=request.state.request_id)


def _of_validation(request: Request, error: RequestValidationError) -> ApiError:
    kind = request.headers.get("content-type", "")
    if (
        error.errors()[0]["loc"] == ("body",)
        and "json" not in kind
        and request.headers.get("content-length", "0") != "0"
    ):
        return ApiError(
            400, f"The body is {ascii(kind) if kind else 'of no type'}. Send it as Content-Type: application/json."
        )
    return validation_error(error.errors())


def _of_http(request: Request, error: HTTPException) -> ApiError:
    method, path = request.method, request.url.path[:_MAX_PATH]
    headers = error.headers
    if error.status_code == 404:
        advice = _advice(path, request.app.openapi()["paths"])
        return ApiError(
            404, f"There is no {ascii(path)[1:-1]} on this server{advice}", code="unknown_url", headers=headers
        )
    if error.status_code == 405:
        allowed = (headers or {}).get("Allow", "")
        message = f"{method} is not possible on {ascii(path)[1:-1]}; it takes {allowed}."
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    if error.status_code == 400:
        # FastAPI could not read the body, and does not say why.
        message = "The body cannot be read: it is no JSON in UTF-8, has a number without end, or is nested too deeply."
        return ApiError(400, message, code="invalid_json", headers=headers)
    return ApiError(error.status_code, _sentence(str(error.detail)), headers=headers)


def _advice(path: str, served: Collection[str]) -> str:
    """Return the end of the sentence on an unknown path: the server that has it and what to use, or a suggestion. Pure."""
    other = instead_of(path) if "/v1/models" in served else None  # else this is the port of the administration
    if other is not None:
        return f"{f': it is a route of {other.servers}' if other.servers else ''}. {other.instead}"
    return f".{did_you_mean(path, served)}" + (" GET / lists the routes." if "/" in served else "")


def _path(location: Sequence[str | int]) -> str:
    """Return a field's path as ``messages[0].content``. Pure."""
    parts = location[1:] if location and location[0] in {"body", "query", "path", "header"} else location
    path = ""
    for part in parts:
        if part == _KEY:
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_PATH]}" if path else part[:_MAX_PATH]
    return path[:_MAX_PATH]


def _sentence(text: str) -> str:
    """Return pydantic's message as a sentence. Pure."""
    text = text.removeprefix("Value error, ").strip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def error_headers(error: ApiError, *, num_bytes: int, close: bool = False) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error answer. Pure.

    Args:
        error: The error.
        num_bytes: Length of its encoded body.
        close: Whether the connection ends with the answer.
    """
    headers: Mapping[str, str] = {
        "content-type": "application/json",
        "content-length": str(num_bytes),
        **({"connection": "close"} if close else {}),
        **error.headers,
    }
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def send_error(send: Send, error: ApiError, *, close: bool = False, more_body: bool = False) -> None:
    """Send an error answer.

    Args:
        send: ASGI ``send`` of the request.
        error: The error.
        close: Whether the connection ends with the answer.
        more_body: Whether the caller completes the answer later; the client gets all of its content now.
    """
    body = error.encoded()
    headers = error_headers(error, num_bytes=len(body), close=close)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def refuse(scope: Scope, receive: Receive, send: Send, error: ApiError, *, close: bool = False) -> None:
    """Send an error before the body was read; the rest of the body is discarded for a while, then the connection closes.

    Args:
        scope: ASGI scope of the request.
        receive: ASGI ``receive`` of the request.
        send: ASGI ``send`` of the request.
        error: The error.
        close: Whether the connection ends with the answer even if there is no body.
    """
    if not has_body(scope):
        await send_error(send, error, close=close)
        return
    await send_error(send, error, close=True, more_body=True)
    try:
        async with asyncio.timeout(_LINGER_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                await asyncio.sleep(_PACE_S)
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def has_body(scope: Scope) -> bool:
    """Return whether a request has a body. Pure."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
