from __future__ import annotations

import asyncio
import functools
import threading

import httpx
import pytest

from support.server.live_server import LiveServer, running
from trencadis.client.async_llm import AsyncLLM
from trencadis.errors import ModelLoadError
from trencadis_server.lifecycle.lifecycle import event_loop_factory


@pytest.fixture
def gated_engine(fake_house):
    """Opens an engine that makes its steps only while an event is set."""
    go_on = threading.Event()
    go_on.set()

    def wait(batch, one):
        go_on.wait(20)

    return functools.partial(AsyncLLM.from_config, *fake_house(fails=wait)), go_on


def completion(server, **body):
    content = {"model": "demo", "prompt": [5, 6], "max_tokens": 4, **body}
    return httpx.post(f"{server.url}/v1/completions", json=content, timeout=20)


def in_background(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def test_the_server_answers_while_the_engine_loads():
    go_on = threading.Event()

    def slow():
        go_on.wait(20)
        raise ModelLoadError("no weights")

    server = LiveServer(slow)
    server.start(until_ready=False)
    answer = httpx.get(f"{server.url}/ready")
    work = completion(server)
    go_on.set()
    server.join()
    assert (answer.status_code, answer.json()["status"]) == (503, "loading")
    assert (work.status_code, work.json()["error"]["code"]) == (503, "engine_loading")
    assert isinstance(server.error, ModelLoadError)


def test_a_stop_lets_running_requests_end_and_takes_no_more(gated_engine):
    open_llm, go_on = gated_engine
    with running(open_llm) as server:
        go_on.clear()
        thread, results = in_background(lambda: completion(server))
        server.wait_until(lambda: server.gate.num_inside == 1)
        server.stop()
        server.wait_until(lambda: server.gate.is_draining)
        late = completion(server)
        health = httpx.get(f"{server.url}/health")
        go_on.set()
        server.join()
        thread.join()
    assert (late.status_code, late.headers["connection"]) == (503, "close")
    assert health.json()["status"] == "draining"
    assert results[0].status_code == 200
    assert results[0].json()["usage"]["completion_tokens"] == 4
    assert server.error is None


def test_what_does_not_end_in_time_is_cut_short_but_answered(gated_engine):
    open_llm, go_on = gated_engine
    with running(open_llm, drain_timeout_s=0.05) as server:
        go_on.clear()
        thread, results = in_background(lambda: completion(server, max_tokens=200))
        server.wait_until(lambda: server.gate.num_inside == 1)
        server.stop()
        server.wait_until(lambda: server.supervisor.is_closing)
        go_on.set()
        server.join()
        thread.join()
    assert results[0].status_code in {200, 503}
    assert server.error is None
    assert server.admission.num_requests == 0


def test_the_fastest_event_loop_that_is_installed_is_used(monkeypatch):
    factory = event_loop_factory()
    loop = factory() if factory else asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert event_loop_factory() is None
