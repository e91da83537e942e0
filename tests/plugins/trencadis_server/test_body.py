from __future__ import annotations

import asyncio
import json

import pytest

from trencadis_server.middleware import failures
from trencadis_server.middleware.body import BodyMiddleware


async def echo(scope, receive, send):
    """Answers with what it was sent; asks for more afterwards, as a streaming answer does."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})
    scope["after"] = (await receive())["type"]


def call(messages, *, headers=(), max_bytes=10, timeout_s=5.0, app=echo):
    """Return status, body, what was sent, and how many messages were taken."""
    middleware = BodyMiddleware(app, max_bytes=max_bytes, timeout_s=timeout_s)
    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked"), *headers]}
    sent, left = [], list(messages)

    async def receive():
        if not left:
            await asyncio.Event().wait()
        message = left.pop(0)
        return await message if asyncio.iscoroutine(message) else message

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(middleware(scope, receive, send), 10))
    status = sent[0]["status"] if sent else None
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return status, body, sent, len(messages) - len(left), scope


def part(body, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


def test_a_body_in_parts_up_to_the_cap_is_given_on_whole_and_then_what_the_connection_says():
    status, body, _, _, scope = call([part(b"ab"), part(b""), part(b"x" * 8, more=False), GONE])
    assert (status, body, scope["after"]) == (200, b"ab" + b"x" * 8, "http.disconnect")


def test_a_body_over_the_cap_is_refused_and_the_rest_thrown_away():
    status, body, sent, taken, _ = call([part(b"x" * 6), part(b"x" * 6), part(b"x" * 6), part(b"", more=False)])
    assert status == 413
    error = json.loads(body)["error"]
    assert "10 bytes (server.max_body_bytes)" in error["message"]
    assert taken == 4
    assert (b"connection", b"close") in sent[0]["headers"]
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("length", [b"11", b"1" + b"0" * 30, b"9" * 5000])
def test_an_announced_length_over_the_cap_is_refused_before_a_byte_is_read(length):
    status, body, sent, _, _ = call([part(b"", more=False)], headers=[(b"content-length", length)])
    assert status == 413
    assert len(body) < 1000
    assert sent[1]["body"] == body  # the whole answer is out before anything is waited for


def test_a_body_that_does_not_come_is_answered_408_with_what_had_come(monkeypatch):
    monkeypatch.setattr(failures, "_LINGER_S", 0.01)
    status, body, sent, *_ = call([part(b"x" * 20)])  # and then nothing more comes: the answer is complete all the same
    assert (status, dict(sent[0]["headers"])[b"content-length"]) == (413, str(len(body)).encode())
    status, body, *_ = call([part(b"abc")], timeout_s=0.05)
    assert status == 408
    assert "3 bytes came" in json.loads(body)["error"]["message"]


def test_a_client_that_leaves_is_not_answered():
    assert call([part(b"abc"), GONE])[0] is None


def test_bodies_on_their_way_in_share_a_budget_that_is_given_back():
    middleware = BodyMiddleware(echo, max_bytes=10, timeout_s=5.0)
    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}

    async def main():
        go_on, statuses = asyncio.Event(), []

        async def one():
            async def receive():
                if step := steps.pop(0) if steps else None:
                    return step
                await go_on.wait()
                return part(b"", more=False)

            async def send(message):
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            steps = [part(b"x" * 10)]
            await middleware(dict(scope), receive, send)

        tasks = [asyncio.create_task(one()) for _ in range(16)]
        for _ in range(3):
            await asyncio.sleep(0)
        seventeenth = asyncio.create_task(one())
        for _ in range(3):
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*tasks, seventeenth)
        assert statuses.count(429) == 1
        assert statuses.count(200) == 16
        await one()
        assert statuses[-1] == 200

    asyncio.run(main())


def test_a_body_that_takes_too_long_to_parse_is_refused_at_once():
    whole = b"[" * 200_001
    status, body, sent, taken, _ = call([part(whole, more=False)], max_bytes=10**6)
    assert (status, taken) == (400, 1)
    assert json.loads(body)["error"]["code"] == "too_many_values"
    assert not sent[-1].get("more_body")


@pytest.mark.parametrize(
    ("header", "status", "word"),
    [
        ((b"content-encoding", b"gzip"), 415, "gzip"),
        ((b"content-encoding", b"identity, br"), 415, "br"),
        ((b"content-encoding", b"\xff" * 1000), 415, "xff"),
        ((b"transfer-encoding", b"gzip"), 400, "chunked, gzip"),
        ((b"content-type", b"application/json; charset=utf-16"), 415, "utf-16"),
        ((b"content-type", b'application/json; x="charset=utf-8"; Charset="latin-1"'), 415, "latin-1"),
        ((b"content-type", b"application/json; charset*=utf-8''ebcdic"), 415, "ebcdic"),
    ],
)
def test_a_body_in_a_form_that_is_not_understood_is_refused_before_it_is_read(header, status, word):
    answered, body, *_ = call([part(b"x", more=False), GONE], headers=[header])
    assert answered == status
    assert word in json.loads(body)["error"]["message"]
    assert len(body) < 1000


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-encoding", b"Identity")],
        [(b"content-type", b"application/json;charset=UTF-8")],
        [(b"content-type", b'application/json; charset="utf8"')],
        [(b"content-type", b"\xe4; a")],
    ],
)
def test_a_body_in_plain_utf8_is_taken(headers):
    assert call([part(b"x", more=False), GONE], headers=headers)[:2] == (200, b"x")
