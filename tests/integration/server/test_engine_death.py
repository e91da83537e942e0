"""The engine in its own process dies or hangs: clients are told why, the log has its stacks, another engine takes over."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.core.paced_backend import VOCAB_SIZE, opener
from support.server.live_server import LiveServer, running
from support.server.raw_client import RawClient, body_of, status_of
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


def pid_of(server: LiveServer) -> int:
    llm: Any = server.supervisor.llm
    pid: int = llm._runner.frontend.engine._transport._peer.pid
    return pid


def assert_replaced(server: LiveServer, pid: int, num_restarts: int) -> None:
    server.wait_until(lambda: server.supervisor.num_restarts == num_restarts and server.supervisor.is_serving.is_set())
    assert pid not in engine_pids()
    assert pid_of(server) in engine_pids()
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert f"trencadis_engine_restarts_total {num_restarts}.0" in httpx.get(f"{server.url}/metrics").text


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("sent", "word"), [(signal.SIGKILL, "sigkill"), (signal.SIGSTOP, "watchdog")])
def test_an_engine_that_dies_or_hangs_is_replaced(server, sent, word):
    number = server.supervisor.num_restarts + 1
    pid = pid_of(server)
    assert pid in engine_pids()
    assert "vllm:generation_tokens_total" in httpx.get(f"{server.url}/metrics").text
    with RawClient(server.port) as streaming, RawClient(server.port) as waiting:
        streaming.post(PATH, LONG)
        while b"token_ids" not in streaming.data:
            streaming.read(4096)
        waiting.post(PATH, {**LONG, "stream": False})
        server.wait_until(lambda: server.supervisor.llm.num_live == 2)
        os.kill(pid, sent)
        streamed, whole = body_of(streaming.read_all()), waiting.read_all()
    (error,) = [event for event in streamed.split(b"\n\n") if b'"error"' in event]
    assert status_of(whole) == 503
    for told in (error.removeprefix(b"data: "), body_of(whole)):
        assert word in json.loads(told)["error"]["message"].lower()
    assert_replaced(server, pid, number)
    answer = httpx.post(f"{server.url}{PATH}", json=SHORT, timeout=300)
    assert answer.json()["choices"][0]["token_ids"] == fake_text([5, 6], 4, vocab_size=VOCAB_SIZE)
    assert (server.admission.num_requests, server.admission.num_waiting_tokens) == (0, 0)


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
        assert_replaced(server, pid, 1)
    log = capfd.readouterr().err
    assert "Current thread" in log
    assert "in match_catastrophically" in log
    assert "trencadis_remote/process/worker.py" in log, "the engine's own thread is shown, too"
