"""A checkpoint whose chat template harms: its chats are refused in words, nothing else suffers, and a signal ends all."""

from __future__ import annotations

import os
import select
import shutil
import signal
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


@pytest.mark.nightly  # without a server by day: core/text/test_chat_template.py
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_chats_that_loop_are_400_with_the_deadline_all_else_is_served_and_a_signal_ends_it_all(tmp_path: Path) -> None:
    shutil.copytree(resolve_model_path("demo"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    server = ServedProcess("--model.path", str(tmp_path / "model"), "--server.model-name", "demo")

    def chat(content: str) -> httpx.Response:
        return server.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=4)

    try:
        server.wait()
        before = set(family(server.process.pid))
        with ThreadPoolExecutor(8) as threads:
            loops = [threads.submit(chat, "loop") for _ in range(3)]
            others = [threads.submit(server.post, prompt="Once", max_tokens=4) for _ in range(2)]
            others += [
                threads.submit(httpx.get, server.url + "/health", timeout=TIMEOUT_S),
                threads.submit(chat, "hello"),
            ]
            assert [one.result().status_code for one in others] == [200] * 4
            for one in loops:
                assert one.result().status_code == 400
                assert "chat template ran longer than 2 s and was stopped" in one.result().json()["error"]["message"]
            assert chat("hello").status_code == 200
            loops = [threads.submit(chat, "loop") for _ in range(3)]
            eventually(lambda: len(set(family(server.process.pid)) - before) >= 1)
            workers = [os.pidfd_open(pid) for pid in set(family(server.process.pid)) - before]
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(TIMEOUT_S)
            for worker in workers:
                assert select.select([worker], [], [], TIMEOUT_S)[0]
                os.close(worker)
            for one in loops:
                one.exception()  # the server is gone, or has answered
    finally:
        server.close()
