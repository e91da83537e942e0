"""The application: routes, documents, HEAD."""

from __future__ import annotations

import json
import types

import pytest

from support.server.server_doubles import OneEngine, app_with, ask, assert_error, make_context
from trencadis.errors import ConfigValueError
from trencadis_server.app import make_app


def test_every_endpoint_is_there():
    paths = set(make_app(make_context()).openapi()["paths"])
    assert paths >= {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/version",
        "/health",
        "/ready",
        "/metrics",
    }


def test_the_document_promises_nothing_in_fastapis_own_shape():
    text = json.dumps(make_app(make_context()).openapi())
    assert '"422"' not in text
    assert "ValidationError" not in text
    assert "securitySchemes" not in text


def test_the_document_says_that_a_key_is_needed():
    document = make_app(make_context(api_keys=("k",))).openapi()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{"key": []}]


def test_browsers_of_allowed_origins_may_call_without_a_key_for_the_question():
    app = app_with(api_keys=("k",), allowed_origins=("https://a.example",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    preflight, other = ask(
        app,
        ("OPTIONS", "/v1/chat/completions", {"headers": headers}),
        ("OPTIONS", "/v1/chat/completions", {"headers": {**headers, "Origin": "https://b.example"}}),
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in other.headers


def test_without_allowed_origins_browsers_are_told_nothing():
    (answer,) = ask(app_with(), ("GET", "/health", {"headers": {"Origin": "https://a.example"}}))
    assert "access-control-allow-origin" not in answer.headers


def test_an_impossible_key_is_found_when_the_application_is_made():
    context = make_context(api_keys=("",))
    with pytest.raises(ConfigValueError):
        make_app(context, routers=())


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


def test_other_methods_are_left_alone():
    (answer,) = ask(app_with(), ("PUT", "/health"))
    assert_error(answer, 405, code="method_not_allowed")
