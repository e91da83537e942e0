"""Lines of a batch: parsing of requests, and the output line of each."""

from __future__ import annotations

import hashlib

import msgspec

from trencadis_server.errors import ApiError
from trencadis_server.protocol.json_body import decode

__all__ = ["ENDPOINTS", "BadLineError", "BatchLine", "OutputLine", "encode", "line_id", "read_line"]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""Paths that a line may request."""


class BadLineError(Exception):
    """A line that is not a valid request.

    Args:
        code: Error code, for programs.
        message: Description of the error, with the number of the line.
        custom_id: ``custom_id`` of the line, or None.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class BatchLine(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        custom_id: The client's name for it, unique in the file.
        method: ``POST``.
        url: One of :data:`ENDPOINTS`.
        body: The request's JSON object, as it stands in the file.
    """

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True):
    """Output of one line: an answer, which may be an endpoint's error, or the reason why there is none.

    Attributes:
        id: Id derived from the line and its number, so that a second run gives the same.
        custom_id: ``custom_id`` of the line; None if it has none.
        response: Answer of the endpoint, or None.
        error: Reason why there is no answer, or None.
    """

    id: str
    custom_id: str | None
    response: _Response | None = None
    error: _Error | None = None

    @classmethod
    def answered(cls, id: str, custom_id: str, *, status: int, request_id: str, body: bytes) -> OutputLine:  # noqa: A002
        """Return the line for an endpoint's answer. Pure."""
        return cls(id=id, custom_id=custom_id, response=_Response(status, request_id, msgspec.Raw(body)))

    @classmethod
    def refused(cls, id: str, error: BadLineError) -> OutputLine:  # noqa: A002
        """Return the line for a bad line. Pure."""
        return cls(id=id, custom_id=error.custom_id, error=_Error(error.code, str(error)))

    @property
    def is_ok(self) -> bool:
        """True if the endpoint answered without an error."""
        return self.response is not None and self.response.status_code == 200


def encode(line: OutputLine) -> bytes:
    """Return a line as JSON, with its newline. Pure."""
    return msgspec.json.encode(line) + b"\n"


def line_id(text: bytes, number: int) -> str:
    """Return the id of a line of the input. Pure.

    Args:
        text: Bytes of the line.
        number: Number of the line, from 1.
    """
    return f"batch_req_{hashlib.blake2b(b'%d:%b' % (number, text.strip()), digest_size=12).hexdigest()}"


def read_line(text: bytes, number: int) -> BatchLine:
    """Return the request of a line. Pure.

    Raises:
        BadLineError: The line is no JSON, lacks a field, or requests something that a batch does not support.
    """
    try:
        line = msgspec.json.decode(text, type=BatchLine)
        body = decode(bytes(line.body))
    except ApiError as error:
        raise BadLineError("invalid_line", f"line {number}: {error.message}", _custom_id(text)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLineError("invalid_line", f"line {number}: {error}.", _custom_id(text)) from error
    if line.method != "POST":
        raise BadLineError(
            "invalid_method", f"line {number}: method is {line.method!r}; it must be POST.", line.custom_id
        )
    if line.url not in ENDPOINTS:
        choices = ", ".join(ENDPOINTS)
        raise BadLineError(
            "invalid_url", f"line {number}: url is {line.url!r}; choose one of: {choices}.", line.custom_id
        )
    if not isinstance(body, dict):
        raise BadLineError("invalid_body", f"line {number}: body is no JSON object.", line.custom_id)
    if body.get("stream"):
        raise BadLineError("invalid_body", f"line {number}: a batch does not stream; leave stream out.", line.custom_id)
    return line


def _custom_id(text: bytes) -> str | None:
    """Return the ``custom_id`` of an otherwise invalid line, if it can be read. Pure."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    return custom_id if isinstance(custom_id, str) else None
