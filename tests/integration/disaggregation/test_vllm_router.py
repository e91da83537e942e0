"""vLLM's router, as it is installed, drives our engines: it sends each request to one and then, with what that said, to the other."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server.served_process import ServedProcess

ROUTER = os.environ.get("TRENCADIS_VLLM_ROUTER") or shutil.which("vllm-router")
PATIENCE_S = 30

pytestmark = pytest.mark.skipif(
    ROUTER is None,
    reason="vllm-router is not installed: pip install vllm-router==0.1.17 in an environment of its own, and name the command in "
    "TRENCADIS_VLLM_ROUTER",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def router(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert ROUTER is not None
    engines = pair.serving()
    url = f"http://127.0.0.1:{free_port()}"
    command = [ROUTER, "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--vllm-pd-disaggregation"]
    command += ["--prefill", engines[0].url, "--decode", engines[1].url, "--kv-connector", "nixl"]
    command += ["--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    log: Path = tmp_path_factory.mktemp("router") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_for(url, process, log)
        yield url
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            if httpx.get(url + "/health", timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            threading.Event().wait(0.1)
    raise AssertionError(f"the router does not serve: {log.read_text()[-2000:]}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_request_through_the_router_is_prefilled_here_and_decoded_there(
    engines: tuple[ServedProcess, ServedProcess], router: str, path: str, stream: bool
) -> None:
    """What it answers is what one engine says alone. (Of the usage the router makes its own.)"""
    prefill, decode = engines
    text = f"{path} {stream} tells of mosaics, " * 10
    body = {"model": "demo", "temperature": 0, "max_tokens": 8, "stream": stream}
    body |= {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    loaded, released = (
        decode.metric('trencadis_kv_tokens_total{connector="p2p",direction="load"'),
        prefill.metric('trencadis_kv_holds_total{connector="p2p",end="released"'),
    )
    answer = httpx.post(router + path, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert decode.metric('trencadis_kv_tokens_total{connector="p2p",direction="load"') - loaded >= 48
    assert prefill.metric('trencadis_kv_holds_total{connector="p2p",end="released"') == released + 1
    alone = httpx.post(decode.url + path, json={**body, "cache_salt": "alone"}, timeout=PATIENCE_S)
    assert said(answer.text) == said(alone.text)


def test_prompt_without_a_full_block_is_answered_too(router: str) -> None:
    answer = httpx.post(router + "/v1/completions", json={"model": "demo", "prompt": "hi", "max_tokens": 4}, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 4


def said(answer: str) -> str:
    """Return the text of an answer, or of all its events."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line not in ("", "data: [DONE]")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    parts = [choice.get("message") or choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    return "".join(part.get("content") or "" for part in parts)
