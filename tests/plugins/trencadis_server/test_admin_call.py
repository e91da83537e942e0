from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request
from starlette.types import Message, Receive, Scope, Send

from trencadis_server.errors import ApiError
from trencadis_server.routes.admin_call import HostMiddleware, check_content_type, table_of


def request(kind: str) -> Request:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "scheme": "http"}
    return Request({**scope, "headers": [(b"content-type", kind.encode())]})


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_taken(kind: str) -> None:
    check_content_type(request(kind))


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_what_a_web_page_may_send_unasked_is_not(kind: str) -> None:
    with pytest.raises(ApiError) as error:
        check_content_type(request(kind))
    assert error.value.status == 415


def status_for(*hosts: str) -> int:
    """Return the status of an answer to a request for hosts."""
    statuses: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        raise AssertionError("it has no body")

    scope = {"type": "http", "headers": [(b"host", host.encode("latin-1")) for host in hosts]}
    asyncio.run(HostMiddleware(app)(scope, receive, send))
    return statuses[0]


@pytest.mark.parametrize("host", ["127.0.0.1:8001", "localhost:1", "[::1]:8001", "LocalHost", "127.0.0.1", "[::1]"])
def test_requests_for_this_machine_are_served(host: str) -> None:
    assert status_for(host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example:8001",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "127.0.0.1@evil",
        "",
        "[::1",
        "::1",
        "a:b:c",
        "ÿ" * 500,
        "localhost:",
        "localhost:1x",
        "evil/127.0.0.1",
    ],
)
def test_requests_for_other_hosts_are_not(host: str) -> None:
    assert status_for(host) == 403


def test_requests_for_no_host_and_for_two_are_not() -> None:
    assert (status_for(), status_for("localhost", "localhost")) == (403, 403)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"[" * 100_000, b"\xff"])
def test_body_that_is_no_object_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(ApiError, match="JSON") as error:
        table_of(body)
    assert error.value.status == 400
    assert table_of(b'{"a": 1}') == {"a": 1}
