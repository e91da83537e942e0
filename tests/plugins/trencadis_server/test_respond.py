from __future__ import annotations

import asyncio

import pytest

from trencadis_server.errors import ApiError
from trencadis_server.middleware import respond
from trencadis_server.middleware.respond import error_headers, has_body, refuse, send_error

ERROR = ApiError(503, "no", headers={"Retry-After": "3"})


def sent_by(coroutine_of):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(coroutine_of(send), 10))
    return sent


def test_an_error_is_sent_with_its_length_and_its_headers():
    start, body = sent_by(lambda send: send_error(send, ERROR))
    assert start["status"] == 503
    headers = dict(start["headers"])
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    assert headers[b"retry-after"] == b"3"
    assert b"connection" not in headers
    assert body["more_body"] is False


def test_a_connection_that_ends_says_so():
    assert (b"connection", b"close") in error_headers(ERROR, num_bytes=1, close=True)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], False),
        ([(b"content-length", b"0")], False),
        ([(b"content-length", b"5")], True),
        ([(b"transfer-encoding", b"chunked")], True),
    ],
)
def test_a_body_is_known_from_the_headers(headers, expected):
    assert has_body({"type": "http", "headers": headers}) is expected


def test_a_refusal_reads_the_rest_of_the_body_and_then_ends():
    parts = [{"type": "http.request", "more_body": True}, {"type": "http.request", "more_body": False}]
    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}

    async def receive():
        return parts.pop(0)

    sent = sent_by(lambda send: refuse(scope, receive, send, ERROR))
    assert parts == []
    assert [message.get("more_body") for message in sent] == [None, True, False]


def test_a_refusal_without_a_body_keeps_the_connection():
    start, _ = sent_by(lambda send: refuse({"type": "http", "headers": []}, None, send, ERROR))
    assert b"connection" not in dict(start["headers"])


def test_what_a_refused_client_goes_on_sending_is_taken_slowly(monkeypatch):
    monkeypatch.setattr(respond, "_LINGER_S", 0.2)
    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}
    taken = []

    async def receive():
        taken.append(1)
        return {"type": "http.request", "body": b"x" * 65536, "more_body": True}

    sent = sent_by(lambda send: refuse(scope, receive, send, ERROR))
    assert [message.get("more_body") for message in sent] == [None, True, False]
    assert len(taken) <= 1 + 0.2 / respond._PACE_S
