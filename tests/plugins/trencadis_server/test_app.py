"""The application: routes, documents, HEAD."""

from __future__ import annotations

import json
import types

import pytest

from support.server.server_doubles import OneEngine, app_with, ask, make_context
from trencadis_server.app import make_app


def test_browsers_of_allowed_origins_may_call_without_a_key_for_the_question():
    app = app_with(api_keys=("k",), allowed_origins=("https://a.example",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    preflight, other, health = ask(
        app,
        ("OPTIONS", "/v1/chat/completions", {"headers": headers}),
        ("OPTIONS", "/v1/chat/completions", {"headers": {**headers, "Origin": "https://b.example"}}),
        ("GET", "/health", {"headers": {"Origin": "https://b.example"}}),
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in health.headers


@pytest.mark.parametrize("path", ["/health", "/openapi.json"])
def test_head_is_answered_as_get_without_the_body(path):
    engine = OneEngine(types.SimpleNamespace(is_alive=True, failure="", stalled=""))
    head, get = ask(app_with(engines=engine), ("HEAD", path), ("GET", path))
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_tells_a_monitor_that_the_server_is_not_ready():
    (answer,) = ask(app_with(), ("HEAD", "/ready"))
    assert (answer.status_code, answer.content) == (503, b"")
    assert answer.headers["retry-after"] == "5"


def test_the_document_says_whether_a_key_is_needed_and_promises_nothing_in_fastapis_own_shape():
    text = json.dumps(make_app(make_context()).openapi())
    assert not [word for word in ('"422"', "ValidationError", "securitySchemes") if word in text]
    document = make_app(make_context(api_keys=("k",))).openapi()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{"key": []}]
