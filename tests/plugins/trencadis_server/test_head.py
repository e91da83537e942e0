from __future__ import annotations

import types

import pytest

from support.server.server_doubles import OneEngine, app_with, ask, assert_error


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
