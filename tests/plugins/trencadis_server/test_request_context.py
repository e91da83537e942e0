from __future__ import annotations

import logging

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from support.server.server_doubles import app_with, ask, assert_error
from trencadis_server.http_metrics import HttpMetrics
from trencadis_server.middleware.request_context import request_id_of


class PanicLike(BaseException):
    """Stands for what PyO3 raises after a panic of Rust."""


def routes() -> APIRouter:
    router = APIRouter()

    @router.get("/v1/id")
    async def show(request: Request) -> str:
        found: str = request.state.request_id
        return found

    @router.get("/v1/fail/{what}")
    async def fail(what: str) -> str:
        raise {"key": KeyError, "gone": ClientDisconnect, "panic": PanicLike}[what]("the secret")

    @router.get("/v1/half")
    async def half() -> StreamingResponse:
        async def body():
            yield b"first"
            raise RuntimeError("the secret")

        return StreamingResponse(body())

    return router


@pytest.mark.parametrize("given", ["abc", "req-1:2/3=x", "A" * 128])
def test_a_plain_request_id_of_the_client_is_kept(given):
    (answer,) = ask(app_with(routes()), ("GET", "/v1/id", {"headers": {"x-request-id": given}}))
    assert answer.json() == answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "A" * 129, "é", "a\tb", '"', "a\x00b"])
def test_any_other_is_replaced(given):
    found = request_id_of(Headers(raw=[(b"x-request-id", given.encode())]))
    assert found.startswith("req_")
    assert found != request_id_of(Headers(raw=[]))


def test_every_answer_carries_the_id_whoever_gave_it():
    app = app_with(routes(), api_keys=("k",), max_body_bytes=1024)
    key = {"Authorization": "Bearer k", "x-request-id": "mine"}
    answers = ask(
        app,
        ("GET", "/v1/id", {"headers": key}),
        ("GET", "/v1/id", {"headers": {"x-request-id": "mine"}}),
        ("GET", "/nowhere", {"headers": key}),
        ("DELETE", "/v1/id", {"headers": key}),
        ("GET", "/v1/fail/key", {"headers": key}),
        ("POST", "/v1/id", {"headers": key, "content": b"x" * 2000}),
    )
    assert [answer.status_code for answer in answers] == [200, 401, 404, 405, 500, 413]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}


@pytest.mark.parametrize("what", ["key", "panic"])
def test_an_unexpected_exception_is_answered_500_without_innards_and_logged_with_them(what, caplog):
    (answer,) = ask(app_with(routes()), ("GET", f"/v1/fail/{what}", {"headers": {"x-request-id": "mine"}}))
    message = assert_error(answer, 500, code="internal_error")
    assert "mine" in message
    assert "secret" not in answer.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "mine" in record.getMessage()
    assert "the secret" in str(record.exc_info[1])


def test_an_answer_that_fails_half_way_is_left_incomplete(caplog):
    app = app_with(routes())
    sent = []

    async def main():
        scope = {
            "type": "http", "method": "GET", "path": "/v1/half", "raw_path": b"/v1/half", "query_string": b"",
            "headers": [], "root_path": "", "scheme": "http", "server": ("t", 80), "http_version": "1.1",
        }  # fmt: skip

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)

    import asyncio

    asyncio.run(main())
    assert [message.get("more_body") for message in sent] == [None, True]
    assert any("GET /v1/half failed" in record.getMessage() for record in caplog.records)


def test_one_line_is_logged_for_a_request_with_its_caller(caplog):
    caplog.set_level(logging.INFO, "trencadis.access")
    app = app_with(routes(), api_keys=("ann:k",))
    ask(app, ("GET", "/v1/id", {"headers": {"Authorization": "Bearer k", "x-request-id": "mine"}}))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "trencadis.access"]
    assert line.startswith("GET /v1/id 200 ")
    assert line.endswith("bytes mine ann")


def test_probes_are_logged_only_when_they_fail(caplog):
    caplog.set_level(logging.INFO, "trencadis.access")
    ask(app_with(), ("GET", "/metrics"), ("GET", "/health"))
    lines = [record.getMessage() for record in caplog.records if record.name == "trencadis.access"]
    assert [line.split()[1:3] for line in lines] == [["/health", "503"]]


def test_requests_are_counted_by_route_and_status_and_none_stays_in_flight():
    metrics = HttpMetrics()
    app = app_with(routes(), more={"http_metrics": metrics})
    ask(app, ("GET", "/v1/id"), ("GET", "/v1/fail/key"), ("GET", "/x/1"), ("GET", "/x/2"))
    with pytest.raises(AssertionError):  # httpx has no answer to return
        ask(app, ("GET", "/v1/fail/gone"))
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.text(engine_up=True))
        for sample in family.samples
    }
    name = "trencadis_http_requests_total"
    assert samples[name, "/v1/id", "200", "GET"] == 1
    assert samples[name, "/v1/fail/{what}", "500", "GET"] == 1
    assert samples[name, "/v1/fail/{what}", "499", "GET"] == 1
    assert samples[name, "404", "GET", "none"] == 2
    assert samples[("trencadis_http_requests_in_flight",)] == 0


def test_requests_that_never_reach_their_route_are_counted_there():
    metrics = HttpMetrics()
    app = app_with(routes(), more={"http_metrics": metrics}, max_body_bytes=1024)
    ask(app, ("POST", "/v1/id", {"content": b"x" * 2000}), ("HEAD", "/v1/fail/key"))
    counted = [
        line for line in metrics.text(engine_up=True).splitlines() if line.startswith("trencadis_http_requests_total")
    ]
    assert counted == [
        'trencadis_http_requests_total{method="POST",route="/v1/id",status="413"} 1.0',
        'trencadis_http_requests_total{method="HEAD",route="/v1/fail/{what}",status="500"} 1.0',
    ]


def test_a_path_with_line_breaks_cannot_write_a_line_of_a_log(caplog):
    caplog.set_level(logging.INFO, "trencadis.access")
    ask(app_with(routes()), ("GET", "/a%0aGET /v1/forged 200"), ("GET", "/v1/fail/%0aforged"))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("trencadis")]
    assert len(lines) == 3
    assert "\n" not in "".join(lines)
