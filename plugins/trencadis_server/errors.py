"""Errors of the API, in OpenAI's format.

exception ▶ as_api_error ▶ ApiError ▶ ``{"error": {"message", "type", "param", "code"}}``, status and headers

Clients look at the status, ``x-should-retry`` and ``Retry-After`` before they try again; people read the message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from trencadis.errors import (
    BackendError,
    ContinuationError,
    EngineEndedError,
    InvalidRequestError,
    PromptTooLongError,
    RequestError,
    RequestRefusedError,
    TrencadisError,
    WrongRoleError,
)

__all__ = ["ApiError", "EngineUnavailableError", "TooBusyError", "as_api_error", "retry_headers"]

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"
UNAVAILABLE = "service_unavailable_error"


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status, 400 .. 599.
        message: Error, with the invalid value, and what to do.
        type: Family of the error.
        param: Field at fault, such as ``messages[0].content``, or None.
        code: Error code for programs, such as ``model_not_found``, or None.
        headers: Additional headers of the answer.

    Attributes:
        status: HTTP status, 400 .. 599.
        message: Error, with the invalid value, and what to do.
        headers: Additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID_REQUEST,  # noqa: A002 - the name it has in the answer
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers: Mapping[str, str] = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the answer. Pure."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """Return the body as ASCII JSON: a message may quote characters that UTF-8 cannot encode, such as lone surrogates."""
        return json.dumps(self.body()).encode("ascii")


class TooBusyError(RequestRefusedError):
    """A limit of the server is reached.

    Cause: ``server.max_requests`` or ``server.max_waiting_tokens``.
    Fix: send it again after ``retry_after_s``, or raise the cap.

    Args:
        message: Limit that is reached, and how full it is.
        retry_after_s: Time after which there is probably room, seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, hint="Send the request again later.", retry_after_s=retry_after_s)


class EngineUnavailableError(EngineEndedError):
    """No engine serves at the moment.

    Cause: the engine is loading, starting again, has ended for good, or the server is shutting down.
    Fix: wait if ``retry_after_s`` is given, else see the server's log.

    Args:
        message: Reason why there is no engine.
        state: ``loading``, ``restarting``, ``failed``, ``draining`` or ``closed``.
        retry_after_s: Time after which to ask again, seconds; None: not at all.
    """

    def __init__(self, message: str, *, state: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.state = state
        self.retry_after_s = retry_after_s


def as_api_error(error: BaseException, *, param: str | None = None, request_id: str = "") -> ApiError:
    """Return the API error for an exception; an unexpected one reveals only the request id. Pure.

    Args:
        error: Exception to convert.
        param: Field that held the prompt, for errors about the prompt.
        request_id: Id of the request, under which the log has an unexpected error.
    """
    match error:
        case ApiError():
            return error
        case WrongRoleError():
            return _unavailable(str(error), "wrong_role", None)
        case ContinuationError():
            return _unavailable(str(error), "engine_ended", error.retry_after_s)
        case RequestRefusedError():
            return _too_many(str(error), error.retry_after_s)
        case PromptTooLongError():
            return ApiError(400, str(error), INVALID_REQUEST, param, "context_length_exceeded")
        case InvalidRequestError():
            return ApiError(error.http_status, str(error), INVALID_REQUEST, error.field or None)
        case RequestError():
            return ApiError(error.http_status, str(error), INVALID_REQUEST)
        case EngineUnavailableError():
            return _unavailable(str(error), f"engine_{error.state}", error.retry_after_s)
        case EngineEndedError():
            return _unavailable(str(error), "engine_ended", 1.0)
        case BackendError():
            return ApiError(error.http_status, str(error), SERVER_ERROR, None, "engine_error")
        case _:
            status = error.http_status if isinstance(error, TrencadisError) else 500
            where = f" Its log has the details under request id {request_id}." if request_id else ""
            return ApiError(status, f"The server failed on this request.{where}", SERVER_ERROR, None, "internal_error")


def retry_headers(retry_after_s: float | None) -> dict[str, str]:
    """Return the headers on whether and when to retry; None: not at all. Pure."""
    if retry_after_s is None:
        return {"x-should-retry": "false"}
    return {"x-should-retry": "true", "Retry-After": str(max(1, math.ceil(retry_after_s)))}


def _too_many(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, RATE_LIMIT, None, "rate_limit_exceeded", retry_headers(retry_after_s))


def _unavailable(message: str, code: str, retry_after_s: float | None) -> ApiError:
    return ApiError(503, message, UNAVAILABLE, None, code, retry_headers(retry_after_s))
