"""A checkpoint whose chat template harms: its chats are refused in words, and nothing else suffers."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.eventually import eventually
from support.server.served_process import ServedProcess, family
from trencadis.text import resolve_model_path

TIMEOUT_S = 300
# It loops for a message that says "loop", and not when the server tries the template.
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
    "{% if 'loop' in m.content %}{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}{% endif %}"
    "{% endfor %}{{ '<|assistant|>' }}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("templates") / "model"
    shutil.copytree(resolve_model_path("demo"), place)
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


@pytest.fixture
def served(model: Path) -> Iterator[ServedProcess]:
    server = ServedProcess("--model.path", str(model), "--server.model-name", "demo")
    try:
        yield server.wait()
    finally:
        server.close()


def chat(server: ServedProcess, content: str) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return server.post("/v1/chat/completions", messages=messages, max_tokens=4)


def test_chats_that_loop_are_400_with_the_deadline_and_all_else_is_served(served: ServedProcess) -> None:
    with ThreadPoolExecutor(8) as threads:
        loops = [threads.submit(chat, served, "loop") for _ in range(3)]
        others = [threads.submit(served.post, prompt="Once", max_tokens=4) for _ in range(2)]
        others += [threads.submit(httpx.get, served.url + "/health", timeout=TIMEOUT_S) for _ in range(2)]
        others.append(threads.submit(chat, served, "hello"))
        assert [one.result().status_code for one in others] == [200] * 5
        for one in loops:
            assert one.result().status_code == 400
            assert "chat template ran longer than 2 s and was stopped" in one.result().json()["error"]["message"]
    assert chat(served, "hello").status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_server_whose_chats_loop_ends_at_sigterm_with_its_workers(served: ServedProcess) -> None:
    before = set(family(served.process.pid))
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(chat, served, "loop") for _ in range(3)]
        eventually(lambda: len(set(family(served.process.pid)) - before) >= 1)
        workers = [os.pidfd_open(pid) for pid in set(family(served.process.pid)) - before]
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(TIMEOUT_S)
        for worker in workers:
            assert select.select([worker], [], [], TIMEOUT_S)[0]
            os.close(worker)
        for future in futures:
            future.exception()  # the server is gone, or has answered
