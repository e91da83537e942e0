"""What clients do to a server that is reachable: nobody else is harmed. Raw bytes and bad requests: ``tests/integration/hostile``."""

from __future__ import annotations

import asyncio
import contextlib
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
BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 5, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(opener(), body_timeout_s=0.5, max_body_bytes=2**20) as running_server:
        yield running_server


def assert_at_rest(server: LiveServer) -> None:
    """Nobody is inside, nothing is live, every block is free."""
    llm = server.supervisor.llm
    server.wait_until(lambda: not (server.gate.num_inside or llm.num_live or num_used_blocks(llm)))
    assert (server.admission.num_requests, server.admission.num_waiting_tokens) == (0, 0)


def assert_serves(server: LiveServer) -> None:
    """A well-behaved client gets the right tokens."""
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == fake_text([5, 6, 7], 5, vocab_size=4096)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_100_mb_is_413_and_costs_no_memory(server, announced):
    before = rss_bytes()
    headers = {"content-type": "application/json", **({"content-length": str(100 * 2**20)} if announced else {})}
    content = (b"x" * 65536 for _ in range(1600))
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=TIMEOUT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert rss_bytes() - before < 16 * 2**20
    assert_serves(server)


def test_two_hundred_connections_that_do_nothing_stop_nobody(server):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.port)) for _ in range(200)]
        assert_serves(server)
        for client in clients:
            assert client.read_all() == b""


def test_a_reader_that_takes_nothing_loses_its_request_and_its_blocks():
    with running(opener(max_model_len=4096, num_blocks=4096), send_timeout_s=0.2) as server:
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        with RawClient(server.port, receive_buffer=4096) as client:
            client.post("/v1/completions", {**BODY, "max_tokens": 4000, "stream": True, "logprobs": 0})
            server.wait_until(lambda: server.gate.num_inside == 1)
            assert_serves(server)
            assert_at_rest(server)
            assert b'"finish_reason":"length"' not in client.read_all()


@pytest.mark.parametrize(
    ("caps", "num_prompt_tokens"),
    [({"max_requests": 8}, 3), ({"max_waiting_tokens": 100}, 60)],
    ids=["requests", "tokens"],
)
def test_a_flood_beyond_the_caps_is_429_and_the_others_are_right(caps, num_prompt_tokens):
    prompt = [5] * num_prompt_tokens

    async def flood(url):
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=TIMEOUT_S) as client:
            body = {**BODY, "prompt": prompt, "max_tokens": 20}
            return await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for _ in range(50)))

    with running(opener(step_s=0.005), **caps) as server:
        answers = asyncio.run(flood(server.url))
        good = [answer for answer in answers if answer.status_code == 200]
        busy = [answer for answer in answers if answer.status_code == 429]
        assert len(good) + len(busy) == 50
        assert good
        assert busy
        expected = fake_text(prompt, 20, vocab_size=4096)
        assert all(answer.json()["choices"][0]["token_ids"] == expected for answer in good)
        for answer in busy:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.headers["x-should-retry"] == "true"
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert_at_rest(server)
        text = httpx.get(f"{server.url}/metrics").text
        assert f"trencadis_http_requests_refused_total {len(busy)}.0" in text
        assert "trencadis_http_requests_in_flight 1.0" in text  # this one
