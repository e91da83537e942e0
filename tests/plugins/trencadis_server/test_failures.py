"""Error answers of routes and of middlewares."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel

from support.server.server_doubles import app_with, ask, assert_error
from trencadis.errors import PromptTooLongError
from trencadis_server.errors import ApiError, TooBusyError
from trencadis_server.middleware import failures
from trencadis_server.middleware.failures import refuse, validation_error


class Part(BaseModel):
    text: str


class Body(BaseModel):
    number: int
    parts: list[Part] = []


def routes() -> APIRouter:
    router = APIRouter()

    @router.post("/v1/take")
    async def take(body: Body) -> int:
        return body.number

    @router.get("/v1/fail/{what}")
    async def fail(what: str) -> None:
        raise {
            "busy": TooBusyError("full.", retry_after_s=7.5),
            "long": PromptTooLongError("too long"),
            "http": HTTPException(418, "short and stout"),
        }[what]

    return router


def post(**arguments):
    (answer,) = ask(app_with(routes()), ("POST", "/v1/take", arguments))
    return answer


JSON = {"content-type": "application/json"}


def test_an_unknown_path_is_404_with_the_closest_one():
    close, slash, long = ask(
        app_with(routes()), *(("POST", path, {"json": {}}) for path in ("/take", "/v1/take/", "/" + "a" * 5000))
    )
    assert 'Did you mean "/v1/take"?' in assert_error(close, 404, code="unknown_url")
    assert_error(slash, 404, code="unknown_url")
    assert len(assert_error(long, 404, code="unknown_url")) < 300


def test_a_body_that_is_no_json_is_400():
    assert "Content-Type: application/json" in assert_error(post(data={"number": "1"}), 400)
    assert "no JSON in UTF-8" in assert_error(post(content=b'"\xff"', headers=JSON), 400, code="invalid_json")


def test_faults_of_keys_and_outside_the_body_have_their_places_without_pydantics_own_marks():
    for location, value, param, message in (
        (("query", "n"), {}, "n", "n: must be a number."),
        (("body", "logit_bias", "a", "[key]"), {"input": "a"}, "logit_bias.a", 'logit_bias.a = "a": must be a number.'),
    ):
        error = validation_error([{"type": "x", "loc": location, "msg": "Value error, must be a number", **value}])
        assert (error.param, error.message) == (param, message)


def test_another_method_is_405_with_those_allowed():
    (answer,) = ask(app_with(routes()), ("GET", "/v1/take"))
    assert "it takes POST" in assert_error(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == "POST"


def test_errors_of_routes_keep_their_status_and_headers():
    busy, long, http = ask(app_with(routes()), *[("GET", f"/v1/fail/{what}") for what in ("busy", "long", "http")])
    assert_error(busy, 429, code="rate_limit_exceeded")
    assert busy.headers["retry-after"] == "8"
    assert_error(long, 400, code="context_length_exceeded")
    assert assert_error(http, 418) == "short and stout."


ERROR = ApiError(503, "no", headers={"Retry-After": "3"})


def sent_by(coroutine_of):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(coroutine_of(send), 10))
    return sent


def test_an_error_is_sent_with_its_length_and_its_headers():
    start, body = sent_by(lambda send: refuse({"type": "http", "headers": []}, None, send, ERROR))
    assert start["status"] == 503
    headers = dict(start["headers"])
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    assert headers[b"retry-after"] == b"3"
    assert b"connection" not in headers
    assert body["more_body"] is False


def test_what_a_refused_client_goes_on_sending_is_taken_slowly(monkeypatch):
    monkeypatch.setattr(failures, "_LINGER_S", 0.2)
    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}
    taken = []

    async def receive():
        taken.append(1)
        return {"type": "http.request", "body": b"x" * 65536, "more_body": True}

    sent = sent_by(lambda send: refuse(scope, receive, send, ERROR))
    assert [message.get("more_body") for message in sent] == [None, True, False]
    assert len(taken) <= 1 + 0.2 / failures._PACE_S
