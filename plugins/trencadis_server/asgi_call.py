"""One request to an ASGI application in this process: the whole server without a socket."""

from __future__ import annotations

import asyncio

import attrs
from starlette.types import ASGIApp, Message

__all__ = ["Answer", "post"]


@attrs.frozen(kw_only=True)
class Answer:
    """What the application answered.

    Attributes:
        status: HTTP status.
        headers: By lower-case name.
        body: All of it.
    """

    status: int
    headers: dict[str, str]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """Send a JSON body and return the whole answer.

    Raises:
        BaseException: What the application raises instead of answering.
    """
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    outgoing: list[Message] = []
    never = asyncio.Event()

    async def receive() -> Message:
        if not incoming:
            await never.wait()  # a client that stays; the call ends with the application's
        return incoming.pop()

    async def send(message: Message) -> None:
        outgoing.append(message)

    await app(_scope(path, body), receive, send)
    start = outgoing[0]
    return Answer(
        status=start["status"],
        headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start.get("headers", [])},
        body=b"".join(message.get("body", b"") for message in outgoing[1:]),
    )


def _scope(path: str, body: bytes) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": ("localhost", 80),
        "state": {},
    }
