from __future__ import annotations

import hashlib

import pytest
from fastapi import APIRouter, Request

from support.server.server_doubles import app_with, ask, assert_error
from trencadis.errors import ConfigValueError
from trencadis_server.middleware.auth import ApiKeys


def callers() -> APIRouter:
    router = APIRouter()

    @router.api_route("/v1/who", methods=["GET", "POST"])
    async def who(request: Request) -> str:
        caller: str = request.state.caller
        return caller

    return router


def bearer(value: str) -> dict[str, object]:
    return {"headers": {"Authorization": value}}


def test_a_known_key_is_let_in_under_its_name():
    app = app_with(callers(), api_keys=("ann:sk-1", "sk-2"))
    first, second, third = ask(
        app,
        ("GET", "/v1/who", bearer("Bearer sk-1")),
        ("GET", "/v1/who", bearer("bearer  sk-2 ")),
        ("POST", "/v1/who", {**bearer("Bearer sk-1"), "json": {}}),
    )
    assert first.json() == third.json() == "ann"
    assert second.json() == "key-" + hashlib.sha256(b"sk-2").hexdigest()[:8]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic sk-1", "sk-1", "Bearer sk-1x", "Bearer SK-1", "Bearer é"]
)
def test_anything_else_is_answered_401(header):
    app = app_with(callers(), api_keys=("ann:sk-1",))
    arguments = {} if header is None else {"headers": {"Authorization": header.encode()}}
    (answer,) = ask(app, ("GET", "/v1/who", arguments))
    assert_error(answer, 401, code="invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("entries", [("",), ("ann:",), ("sk-1", "ann:sk-1")])
def test_impossible_entries_are_refused_without_showing_a_key(entries):
    with pytest.raises(ConfigValueError, match=r"\[server\] api_keys: entry") as refused:
        ApiKeys(entries)
    assert "sk-1" not in str(refused.value)


def test_every_key_is_compared_each_time(monkeypatch):
    import trencadis_server.middleware.auth as module

    compared = []
    real = module.hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    keys = ApiKeys(("a", "b", "c"))
    for key in (b"a", b"c", b"no"):
        keys.caller_of(key)
    assert len(compared) == 9


@pytest.mark.parametrize("key", ["schlüssel", "voilà"])  # the last byte of the second is a blank in Latin-1
def test_a_key_of_other_than_ascii_characters_works(key):
    app = app_with(callers(), api_keys=(f"ann:{key}",))
    (answer,) = ask(app, ("GET", "/v1/who", {"headers": {"Authorization": f"Bearer {key}".encode()}}))
    assert answer.json() == "ann"


def test_operators_need_no_key_and_an_unknown_path_does():
    paths = ("/health", "/ready", "/metrics", "/v1/nothing")
    *operators, unknown = ask(app_with(api_keys=("sk-1",)), *(("GET", path) for path in paths))
    assert 401 not in [answer.status_code for answer in operators]
    (known,) = ask(app_with(api_keys=("sk-1",)), ("GET", "/v1/nothing", bearer("Bearer sk-1")))
    assert (unknown.status_code, known.status_code) == (401, 404)


def test_without_configured_keys_everybody_may_call_and_has_no_name():
    (answer,) = ask(app_with(callers()), ("GET", "/v1/who"))
    assert answer.json() == ""
