from __future__ import annotations

from typing import Any

import pytest
from fastapi import Request

from trencadis.server.admin_call import check_caller, table_of
from trencadis.server.errors import ApiError


def request(host: str = "127.0.0.1:8001", kind: str = "application/json") -> Request:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "scheme": "http"}
    return Request({**scope, "headers": [(b"host", host.encode()), (b"content-type", kind.encode())]})


@pytest.mark.parametrize("host", ["127.0.0.1:8001", "localhost:1", "[::1]:8001"])
@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_callers_of_this_machine_with_json_are_let_in(host: str, kind: str) -> None:
    check_caller(request(host, kind))


def test_web_pages_are_not() -> None:
    with pytest.raises(ApiError) as wrong_host:
        check_caller(request(host="rebound.example:8001"))
    with pytest.raises(ApiError) as wrong_kind:
        check_caller(request(kind="text/plain"))
    assert (wrong_host.value.status, wrong_kind.value.status) == (403, 415)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"[" * 100_000, b"\xff"])
def test_body_that_is_no_object_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(ApiError, match="JSON") as error:
        table_of(body)
    assert error.value.status == 400
    assert table_of(b'{"a": 1}') == {"a": 1}
