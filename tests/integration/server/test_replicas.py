"""Replicas behind a server: one is killed in the middle of requests, and nobody notices; all die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.core.paced_backend import VOCAB_SIZE, opener
from support.eventually import eventually
from support.server.live_server import LiveServer, running
from support.server.raw_client import RawClient, body_of, status_of
from trencadis_testing.fakes import fake_text

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="kills processes by their id")

PATH = "/v1/completions"
PARALLEL = {"data": 2, "max_restarts": 3}
NUM_TOKENS = 160
TEXTS = {number: fake_text([5, number], NUM_TOKENS, vocab_size=VOCAB_SIZE) for number in range(8)}


def body(number: int, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": [5, number], "max_tokens": NUM_TOKENS, "return_token_ids": True, **more}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    tables = {"parallel": PARALLEL, "router": {"name": "least_loaded"}}
    with running(opener(step_s=0.015, sampling="standard", tables=tables), max_engine_restarts=1) as one:
        yield one


def client_of(server: LiveServer) -> Any:
    llm: Any = server.supervisor.llm
    return llm._runner.frontend.engine


def pids(server: LiveServer) -> dict[int, int]:
    return {seat.index: replica.client._transport._peer.pid for seat, replica in client_of(server).replicas.live}


def states(server: LiveServer) -> list[str]:
    answer = server.call(server.supervisor.llm.replicas())
    return [row["state"] for row in answer["replicas"]]


def until_ready(server: LiveServer) -> None:
    eventually(lambda: states(server) == ["ready", "ready"])


def streamed(data: bytes) -> list[int]:
    events = [event.removeprefix(b"data: ") for event in body_of(data).strip().split(b"\n\n")]
    assert events[-1] == b"[DONE]", events[-1]
    found = [json.loads(event) for event in events[:-1]]
    assert all("choices" in one for one in found), found
    return [token for one in found for token in one["choices"][0]["token_ids"]]


def test_a_replica_that_is_killed_loses_no_request(server: LiveServer) -> None:
    until_ready(server)
    route = server.call(server.supervisor.llm.route([1, 2, 3]))
    assert (route["is_healthy"], route["replica"] in (0, 1)) == ([True, True], True)
    victim = pids(server)[0]
    work = client_of(server).replicas.work
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.port)) for _ in range(8)]
        for number, client in enumerate(clients):
            client.post(PATH, body(number, stream=number % 2 == 0))
        server.wait_until(lambda: len(work) == 8 and all(len(one.tokens) > 3 for one in list(work.values())))
        os.kill(victim, signal.SIGKILL)
        answers = [client.read_all() for client in clients]
    assert {status_of(answer) for answer in answers} == {200}
    got = {
        number: json.loads(body_of(answer))["choices"][0]["token_ids"] if number % 2 else streamed(answer)
        for number, answer in enumerate(answers)
    }
    assert got == TEXTS
    assert httpx.get(f"{server.url}/ready").status_code == 200  # the other one is
    page = httpx.get(f"{server.url}/metrics").text
    assert 'trencadis_replica_up{replica="1"} 1.0' in page
    assert 'trencadis_replica_moved_total{replica="0"} 4.0' in page
    until_ready(server)
    assert pids(server)[0] != victim
    assert server.supervisor.num_restarts == 0
    assert (server.admission.num_requests, server.admission.num_waiting_tokens) == (0, 0)


@pytest.mark.slow
def test_when_all_die_clients_get_503_and_the_server_starts_all_again(server: LiveServer) -> None:
    until_ready(server)
    with RawClient(server.port) as waiting:
        waiting.post(PATH, body(0))
        server.wait_until(lambda: len(client_of(server).replicas.work) == 1)
        for pid in pids(server).values():
            os.kill(pid, signal.SIGKILL)
        answer = waiting.read_all()
    assert status_of(answer) == 503
    assert "no replica is left" in json.loads(body_of(answer))["error"]["message"]
    server.wait_until(lambda: server.supervisor.num_restarts == 1 and server.supervisor.is_serving.is_set())
    assert states(server) == ["ready", "ready"]
    assert httpx.post(f"{server.url}{PATH}", json=body(1), timeout=60).json()["choices"][0]["token_ids"] == TEXTS[1]
