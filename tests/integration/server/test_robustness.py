"""What clients do to a server that is reachable: each gets the right status, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.core.paced_backend import num_used_blocks, opener
from support.server.live_server import LiveServer, running
from support.server.raw_client import RawClient
from trencadis_testing.fakes import fake_text

TIMEOUT_S = 20
JSON = {"content-type": "application/json"}
BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 5, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(opener(), body_timeout_s=0.5, max_body_bytes=2**20) as running_server:
        yield running_server


def assert_at_rest(server: LiveServer) -> None:
    """Nobody is inside, nothing is live, every block is free."""
    server.wait_until(lambda: not server.gate.num_inside)
    server.wait_until(lambda: not server.supervisor.llm.num_live)
    server.wait_until(lambda: not num_used_blocks(server.supervisor.llm))
    assert (server.admission.num_requests, server.admission.num_waiting_tokens) == (0, 0)


def assert_serves(server: LiveServer) -> None:
    """A well-behaved client gets the right tokens."""
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == fake_text([5, 6, 7], 5, vocab_size=4096)


def chat(**changes):
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **changes}


def deep(levels):
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
)
def test_what_cannot_be_understood_is_400_in_openais_shape(server, path):
    for content in (
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "demo", "prompt": "\\ud800", "input": "\\ud800", "messages": 1}',
        b'{"model": "demo", "prompt": NaN}',
        b'{"model": "demo", "prompt": "x", "temperature": Infinity}',
        b'{"model": "demo", "prompt": "x", "max_tokens": 1' + b"0" * 400 + b"}",
        b'{"model": "demo", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "demo", "prompt": "x", "temperature": "hot", "input": {}, "messages": {}, "tokens": "x"}',
        b'{"model": "demo", "prompt": ' + deep(50_000) + b"}",
        b'{"model": "demo", "logit_bias": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"model": "demo", "model": "demo", "nonsense": 1}',
        b'{"model": 5}',
    ):
        answer = httpx.post(f"{server.url}{path}", content=content, headers=JSON, timeout=TIMEOUT_S)
        assert answer.status_code == 400, (content[:80], answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {**BODY, "model": "other"}, 404, "model_not_found"),
        ("/v1/chat/completions", chat(model="other"), 404, "model_not_found"),
        ("/v1/completions", {**BODY, "prompt": [5] * 300}, 400, "context_length_exceeded"),
        ("/v1/completions", {**BODY, "prompt": [4096]}, 400, None),
        ("/v1/completions", {**BODY, "prompt": [-1]}, 400, None),
        ("/v1/completions", {**BODY, "prompt": []}, 400, None),
        ("/v1/completions", {**BODY, "n": 0}, 400, None),
        ("/v1/completions", {**BODY, "n": 10**9}, 400, None),
        ("/v1/completions", {**BODY, "prompt": [[5]] * 2000}, 400, None),
        ("/v1/chat/completions", chat(messages=[]), 400, None),
    ],
)
def test_what_cannot_be_served_is_refused(server, path, body, status, code):
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == status, answer.text
    if code:
        assert answer.json()["error"]["code"] == code
    assert_at_rest(server)


def test_half_a_surrogate_pair_in_a_prompt_harms_nobody(server):
    content = b'{"model": "demo", "prompt": "a\\ud800b", "max_tokens": 1}'
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=JSON, timeout=TIMEOUT_S)
    assert answer.status_code in {200, 400}
    assert_serves(server)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def chunks_of(num_bytes, counter):
    part = b"x" * 65536
    for _ in range(num_bytes // len(part)):
        counter.append(len(part))
        yield part


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_100_mb_is_413_and_costs_no_memory(server, announced):
    before, sent = rss_bytes(), []
    headers = {**JSON, "content-length": str(100 * 2**20)} if announced else JSON
    answer = httpx.post(
        f"{server.url}/v1/completions", content=chunks_of(100 * 2**20, sent), headers=headers, timeout=TIMEOUT_S
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert rss_bytes() - before < 16 * 2**20
    assert_serves(server)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_has_shut_its_sending_side_gets_its_answer(server, streams):
    with RawClient(server.port) as client:
        client.post("/v1/completions", {**BODY, "stream": streams})
        client.socket.shutdown(socket.SHUT_WR)
        answer = client.read_all().removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert (b"data: [DONE]" if streams else b'"finish_reason":"length"') in answer
    assert_at_rest(server)


def test_a_client_that_waits_to_be_asked_for_its_body_never_sends_it(server):
    with connected(server) as client:
        client.sendall(head("/v1/completions", f"content-length: {100 * 2**20}", "expect: 100-continue"))
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def head(path, *headers):
    lines = [f"POST {path} HTTP/1.1", "host: t", "content-type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


@contextlib.contextmanager
def connected(server, *, receive_buffer=0):
    with socket.socket() as client:
        client.settimeout(TIMEOUT_S)
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", server.port))
        yield client


def until_closed(client):
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            data += part
    return data


def test_a_body_that_stops_half_way_is_answered_408(server):
    with connected(server) as client:
        client.sendall(head("/v1/completions", "content-length: 100") + b'{"model"')
        answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_connection_that_says_nothing_is_closed(server):
    with connected(server) as client:
        assert until_closed(client) == b""


def test_a_head_that_stops_in_the_middle_is_answered_408(server):
    with connected(server) as client:
        client.sendall(b"POST /v1/comp")
        answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_client_that_closes_half_its_connection_ends_its_request(server):
    content = json.dumps({**BODY, "max_tokens": 200, "stream": True}).encode()
    with connected(server) as client:
        client.sendall(head("/v1/completions", f"content-length: {len(content)}") + content)
        client.shutdown(socket.SHUT_WR)
        until_closed(client)
    assert_at_rest(server)


def test_two_hundred_connections_that_do_nothing_stop_nobody(server):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(200)]
        assert_serves(server)
        for client in clients:
            assert until_closed(client) == b""


def test_a_reader_that_takes_nothing_loses_its_request_and_its_blocks():
    with running(opener(max_model_len=4096, num_blocks=4096), send_timeout_s=0.2) as server:
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        content = json.dumps({**BODY, "max_tokens": 4000, "stream": True, "logprobs": 0}).encode()
        with connected(server, receive_buffer=4096) as client:
            client.sendall(head("/v1/completions", f"content-length: {len(content)}") + content)
            server.wait_until(lambda: server.gate.num_inside == 1)
            assert_serves(server)
            assert_at_rest(server)
            assert b'"finish_reason":"length"' not in until_closed(client)


def test_a_flood_beyond_the_caps_is_429_and_the_others_are_right():
    expected = fake_text([5, 6, 7], 20, vocab_size=4096)

    async def flood(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S) as client:
            posts = [client.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 20}) for _ in range(100)]
            return await asyncio.gather(*posts)

    with running(opener(step_s=0.005), max_requests=8) as server:
        answers = asyncio.run(flood(server.url))
        good = [answer for answer in answers if answer.status_code == 200]
        busy = [answer for answer in answers if answer.status_code == 429]
        assert len(good) + len(busy) == 100
        assert len(good) >= 8
        assert busy
        assert all(answer.json()["choices"][0]["token_ids"] == expected for answer in good)
        for answer in busy:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.headers["x-should-retry"] == "true"
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert_at_rest(server)
        text = httpx.get(f"{server.url}/metrics").text
        assert f"trencadis_http_requests_refused_total {len(busy)}.0" in text


def test_too_many_waiting_tokens_are_429():
    with running(opener(step_s=0.05), max_waiting_tokens=100) as server:

        async def send():
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                posts = [
                    client.post(f"{server.url}/v1/completions", json={**BODY, "prompt": [5] * 60}) for _ in range(4)
                ]
                return sorted(answer.status_code for answer in await asyncio.gather(*posts))

        statuses = asyncio.run(send())
        assert 429 in statuses
        assert 200 in statuses
        assert set(statuses) == {200, 429}
        assert_at_rest(server)


def test_after_all_of_this_the_server_is_as_it_was(server):
    assert_serves(server)
    assert_at_rest(server)
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{server.url}/metrics").text
    assert 'status="500"' not in text
    assert "trencadis_http_requests_in_flight 1.0" in text  # this one
