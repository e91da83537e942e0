"""What routes raise, as answers in OpenAI's shape: one handler for each kind.

Nothing that FastAPI or Starlette would say by themselves reaches a client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from trencadis.errors import TrencadisError, did_you_mean
from trencadis_server.errors import ApiError, as_api_error

__all__ = ["add_handlers", "validation_error"]

_NO_OBJECT = frozenset({"model_attributes_type", "model_type", "dict_type"})
"""What pydantic calls a body that is an array, a string, a number or null."""

_KEY = "[key]"
"""What pydantic puts after a name if the name itself is at fault."""

_MAX_QUOTED = 40
_MAX_PATH = 200


def add_handlers(app: FastAPI) -> None:
    """Let an application answer every error of a route in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _handler(_of_validation))
    app.add_exception_handler(HTTPException, _handler(_of_http))
    app.add_exception_handler(TrencadisError, _handler(_of_any))
    app.add_exception_handler(ApiError, _handler(_of_any))


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for what pydantic found; it names the first field at fault. Pure.

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
    """Return the value at fault as a message quotes it, or nothing if it is long. Pure."""
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
        near = did_you_mean(path, request.app.openapi()["paths"])
        return ApiError(
            404, f"There is no {ascii(path)[1:-1]} on this server.{near}", code="unknown_url", headers=headers
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


def _path(location: Sequence[str | int]) -> str:
    """Return a place in the body as people write it: ``messages[0].content``. Pure."""
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
