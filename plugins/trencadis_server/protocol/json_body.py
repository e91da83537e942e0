"""JSON bodies: the values of a request are counted before parsing, and large requests are parsed and validated on a thread.

    bytes ▶ count (400: too many values) ▶ decode ▶ validate ▶ endpoint

A call of a C library cannot be interrupted, even on a thread: it holds the GIL until it returns. So the limits of a
body follow from how long the longest of these calls takes; between two of them the event loop runs.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from trencadis.records.plain import MAX_DEPTH, plain_fault
from trencadis_server.context import context_of
from trencadis_server.errors import ApiError
from trencadis_server.fair_threads import FairThreads
from trencadis_server.middleware.failures import validation_error

__all__ = ["MAX_VALUES", "JsonRoute", "ValueCheck", "check_values", "decode", "json_response", "read_body"]

MAX_VALUES = 500_000
"""Most values of a body by default; so many numbers are parsed in 20 ms and validated in as long."""
_MAX_CONTAINERS = 65_536
"""Most lists and objects of a body: three quarters are three for each of the most messages. Each may start the garbage
collector."""
_MAX_KEYS = 100_000
"""Most keys of all objects of a body; different ones take half a microsecond each."""
_MAX_COUNTED_INLINE = 65_536
"""Most bytes that are counted on the event loop, which takes a tenth of a millisecond."""
_MAX_EXPLAINED = 2**20
"""Largest body, bytes, that is parsed a second time, slowly, to find the place of an error."""

ModelT = TypeVar("ModelT", bound=BaseModel)

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{:,]', re.DOTALL)
"""A string, which may lack its end, or a sign that opens a list or an object or separates values. Possessive: needs no memory."""


class ValueCheck:
    """Refuses bodies with too many values. Event loop only.

    Args:
        max_values: Maximum number of values in a body.
        max_keys: Maximum number of keys of all objects.
        max_containers: Maximum number of lists and objects.
        threads: Threads on which large bodies are counted; None: one of its own.
    """

    def __init__(
        self,
        max_values: int = MAX_VALUES,
        *,
        max_keys: int = _MAX_KEYS,
        max_containers: int = _MAX_CONTAINERS,
        threads: FairThreads | None = None,
    ) -> None:
        self._limits = (max_containers, max_keys, max_values)
        self._threads = threads or FairThreads(1)

    async def check(self, body: bytes, *, caller: str = "") -> None:
        """Check a body, JSON or not; a large one takes some milliseconds per megabyte, on a thread.

        Args:
            body: Body of a request.
            caller: Name of the API key.

        Raises:
            ApiError: The body has too many.
        """
        if len(body) <= min(self._limits):
            return
        if len(body) <= _MAX_COUNTED_INLINE:
            _check_number(body, self._limits)
        else:
            call = functools.partial(_check_number, body, self._limits)
            await self._threads.run(call, num_characters=len(body), caller=caller)


def _check_number(body: bytes, limits: tuple[int, int, int]) -> None:
    excess = _excess(body, limits)
    if excess:
        raise ApiError(
            400, f"The body has more than {excess}. Send a smaller request, or several.", code="too_many_values"
        )


def _excess(body: bytes, limits: tuple[int, int, int]) -> str:
    """Return the limit that a JSON text exceeds, for the message, or an empty string. Pure."""
    max_containers, max_keys, max_values = limits
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers <= max_containers and body.count(b":") <= max_keys:
        num_commas = body.count(b",")
        if num_commas + num_containers <= max_values:
            return ""
    # Many of these signs may be in texts. The closer look works token by token, so that other threads can run.
    containers = keys = values = strings = 0
    for token in _TOKEN.finditer(body):
        match token[0][:1]:
            case b'"':
                strings += 1
            case b",":
                values += 1
            case b":":
                keys += 1
            case _:
                containers += 1
        if containers > max_containers:
            return f"{max_containers} lists and objects"
        if keys > max_keys:
            return f"{max_keys} keys"
        # In JSON there are as many strings as keys and values at most.
        if values + containers > max_values or strings > max_values + max_keys + 1:
            return f"{max_values} values (server.max_body_values)"
    return ""


def decode(body: bytes) -> Any:
    """Return the decoded JSON text. Pure.

    Raises:
        ApiError: 400: the text is no JSON, or has NaN, infinity, half a surrogate pair, or too deep nesting. A number
            beyond 64 bits is left to the checks of fields.
    """
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if len(body) > _MAX_EXPLAINED:
            raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    return _decode_slowly(body)


def check_values(data: Any) -> None:
    """Refuse a decoded body with a value that cannot be passed to an engine. Pure.

    Raises:
        ApiError: 400, with the place of the value.
    """
    fault = plain_fault(data)
    if fault is not None:
        raise _refusal(*fault)


def read_body(body: bytes, model: type[ModelT]) -> ModelT:
    """Return a JSON text as an instance of a request model. Pure.

    Raises:
        ApiError: 400: the text is no valid instance.
    """
    data = decode(body)
    if isinstance(data, dict):
        check_values({name: value for name, value in data.items() if name in model.model_fields})
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None


class JsonRoute(APIRoute):
    """A route whose body is decoded and validated before FastAPI: on a thread if it is large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: Any = self.body_field.field_info.annotation

        async def serve(request: Request) -> Response:
            if "json" in request.headers.get("content-type", "") and (body := await request.body()):
                # FastAPI uses a body that the request has parsed already, and accepts an instance of the class as
                # valid.
                call = functools.partial(read_body, body, model)
                request._json = await context_of(request).parser.run(  # noqa: SLF001
                    call, num_characters=len(body), caller=request.state.caller
                )
            return await handle(request)

        return serve


def _decode_slowly(body: bytes) -> Any:
    """Return a value that the fast parser refuses, or raise an error with the place of the fault."""
    try:
        data = json.loads(body)
    except json.JSONDecodeError as error:
        raise ApiError(
            400, f"The body is not valid JSON: {error.msg} at character {error.pos}.", code="invalid_json"
        ) from None
    except RecursionError:
        raise _too_deep(body) from None
    except ValueError:
        message = "The body cannot be read: it is no JSON in UTF-8, or has a number of too many digits."
        raise ApiError(400, message, code="invalid_json") from None
    fault = plain_fault(data, is_json=True)
    if fault is not None:
        raise _refusal(*fault)
    return data


def _too_deep(body: bytes) -> ApiError:
    """Return the error for too deep nesting, with the field where it begins."""
    depth, field, text = 0, "", b""
    for token in re.finditer(_TOKEN.pattern + rb"|[\]}]", body, re.DOTALL):
        match token[0][:1]:
            case b'"':
                text = token[0]
            case b":" if depth == 1:
                field = ascii(text[1:-1].decode(errors="replace")[:80])[1:-1]
            case b"[" | b"{":
                depth += 1
            case b"]" | b"}":
                depth -= 1
        if depth > MAX_DEPTH + 1:
            break
    path = field or "The JSON body"
    return ApiError(
        400, f"{path} is nested more than {MAX_DEPTH} levels deep.", param=field or None, code="invalid_json"
    )


def _refusal(where: str, why: str) -> ApiError:
    path = where.removeprefix(".")
    if "nested" in why:
        path = re.split(r"[.\[]", path, maxsplit=1)[0]  # the rest is as long as it is deep
    return ApiError(400, f"{path or 'The body'} {why}.", param=path or None)


def json_response(answer: Any) -> Response:
    """Return a response with status 200. Pure."""
    return Response(msgspec.json.encode(answer), media_type="application/json")
