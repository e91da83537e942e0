"""The engine in its own process dies or hangs: clients are told why, ``/health`` says so, another engine takes over.

One that makes no progress is noticed also if nobody asks for anything; the answer says where it is stuck, and the log has its stacks.
"""

from __future__ import annotations

import json
import os
import re
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
from trencadis.errors import EngineEndedError
from trencadis_testing.fakes import fake_text

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine in Linux's /proc")

PATH = "/v1/completions"
SHORT = {"model": "demo", "prompt": [5, 6], "max_tokens": 4, "return_token_ids": True}
LONG = {**SHORT, "max_tokens": 240, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(opener(step_s=0.02, placement="process", watchdog_s=4.0), max_engine_restarts=2) as running_server:
        yield running_server


def engine_pids() -> list[int]:
    """Return the processes that this one has started and that are engines."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            # A whole argument: the process that runs blocks of the docs names such modules in its code.
            if b"trencadis_remote.process" in arguments:
                found.append(int(child))
    return found


def serves(server: LiveServer) -> bool:
    answer = httpx.post(f"{server.url}{PATH}", json=SHORT, timeout=300)
    if answer.status_code != 200:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        return False
    expected = fake_text([5, 6], 4, vocab_size=VOCAB_SIZE)
    assert answer.json()["choices"][0]["token_ids"] == expected
    return True


def until_it_serves_again(server: LiveServer, num_restarts: int) -> None:
    server.wait_until(lambda: server.supervisor.num_restarts == num_restarts and server.supervisor.is_serving.is_set())
    assert serves(server)


def test_the_engine_has_a_process_of_its_own_and_serves(server):
    pid = pid_of(server)
    assert pid in engine_pids()
    assert pid != os.getpid()
    assert serves(server)
    assert "vllm:generation_tokens_total" in httpx.get(f"{server.url}/metrics").text


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("sent", "word"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "watchdog")])
def test_an_engine_that_dies_or_hangs_is_replaced(server, sent, word):
    number = server.supervisor.num_restarts + 1
    pid = pid_of(server)
    with RawClient(server.port) as streaming, RawClient(server.port) as waiting:
        streaming.post(PATH, LONG)
        while b"token_ids" not in streaming.data:
            streaming.read(4096)
        waiting.post(PATH, {**LONG, "stream": False})
        server.wait_until(lambda: server.supervisor.llm.num_live == 2)
        os.kill(pid, sent)
        streamed, whole = body_of(streaming.read_all()), waiting.read_all()
    last = streamed.strip().split(b"\n\n")
    error = json.loads(next(event for event in reversed(last) if b"error" in event).removeprefix(b"data: "))["error"]
    assert word.lower() in error["message"].lower()
    assert status_of(whole) == 503
    assert word.lower() in json.loads(body_of(whole))["error"]["message"].lower()
    assert not serves(server) or server.supervisor.num_restarts == number
    until_it_serves_again(server, number)
    assert pid not in engine_pids()
    assert pid_of(server) in engine_pids()
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert f"trencadis_engine_restarts_total {number}.0" in httpx.get(f"{server.url}/metrics").text
    assert (server.admission.num_requests, server.admission.num_waiting_tokens) == (0, 0)


@pytest.mark.slow
def test_after_too_many_deaths_the_server_answers_and_ends_with_the_reason() -> None:
    server = LiveServer(opener(step_s=0.02, placement="process"), max_engine_restarts=0)
    server.start()
    with RawClient(server.port) as waiting:
        waiting.post(PATH, {**LONG, "stream": False})
        server.wait_until(lambda: server.supervisor.llm.num_live == 1)
        os.kill(pid_of(server), signal.SIGKILL)
        answer = waiting.read_all()
    server.join()
    assert status_of(answer) == 503
    assert "SIGKILL" in json.loads(body_of(answer))["error"]["message"]
    assert isinstance(server.error, EngineEndedError)
    assert server.error.exit_code == 69
    assert "SIGKILL" in str(server.error)


def pid_of(server: LiveServer) -> int:
    llm: Any = server.supervisor.llm
    pid: int = llm._runner.frontend.engine._transport._peer.pid
    return pid


def reason_of_the_stall(server: LiveServer) -> str:
    """Wait until the server is not ready because its engine is stalled; return what it says."""
    seen: list[str] = []

    def is_stalled() -> bool:
        answer = httpx.get(f"{server.url}/ready", timeout=300)
        if answer.status_code == 503 and answer.json()["status"] == "stalled":
            assert int(answer.headers["retry-after"]) >= 1
            seen.append(answer.json()["reason"])
        return bool(seen)

    eventually(is_stalled)
    return seen[0]


def until_replaced(server: LiveServer, pid: int) -> None:
    server.wait_until(lambda: server.supervisor.num_restarts == 1 and server.supervisor.is_serving.is_set())
    assert pid_of(server) != pid
    assert httpx.get(f"{server.url}/ready").status_code == 200


@pytest.mark.slow
def test_an_idle_engine_that_is_stopped_is_noticed_without_any_request_and_replaced() -> None:
    with running(opener(placement="process", watchdog_s=4.0)) as server:
        pid = pid_of(server)
        os.kill(pid, signal.SIGSTOP)
        # It may not have come to rest yet when it is stopped.
        assert re.match(
            r"The engine is stalled: step 0 for .* s in (loading|requests|idle)\.", reason_of_the_stall(server)
        )
        until_replaced(server, pid)
        assert serves(server)


@pytest.mark.slow
def test_code_that_holds_pythons_lock_is_found_in_the_log_and_its_request_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    open_llm = opener(placement="process", watchdog_s=4.0, backend="support.core.stuck_backend:StuckBackend")
    with running(open_llm) as server:
        pid = pid_of(server)
        answer = httpx.post(f"{server.url}{PATH}", json=SHORT, timeout=300)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "hung: no progress in step 0" in answer.json()["error"]["message"]
        assert "in backend.forward" in answer.json()["error"]["message"]
        until_replaced(server, pid)
    log = capfd.readouterr().err
    assert "Current thread" in log
    assert "in match_catastrophically" in log
    assert "trencadis_remote/process/worker.py" in log, "the engine's own thread is shown, too"
