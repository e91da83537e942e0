"""A cluster with real processes: requests stay where they came, prompts are computed elsewhere, and a prefill process that is killed costs
no answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.eventually import eventually
from support.server.served_process import family, send
from trencadis import LLM, SamplingParams

PATIENCE_S = 300.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def text_of(seed: int) -> str:
    return f"Chapter {seed}. The mosaics of the {seed}th house are made of broken tiles, " * 8


class ClusterProcess:
    """``trencadis cluster up`` with one engine that computes prompts and two that generate."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        words = ["up", "--prefill", "1", "--decode", "2", "--model", "demo", "--port", str(self.port)]
        words += ["--engine.warmup", "false", "--cache.num-blocks", "256", "--cache.block-size", "16"]
        words += ["--kv-connector.p2p.min-remote-tokens", "64", "--kv-connector.p2p.heartbeat-s", "0.5"]
        words += ["--kv-connector.p2p.max-slowdown", "1000"]
        # An engine that is slow to answer, as all are on a loaded machine, must not count as gone.
        words += ["--kv-connector.p2p.connect-timeout-s", "30", "--kv-connector.p2p.prefill-timeout-s", "60"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trencadis", "cluster", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[3],
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def until(self, text: str, times: int = 1) -> None:
        """Wait until it has said something."""
        until_s = time.monotonic() + PATIENCE_S
        while sum(text in line for line in self.lines) < times:
            assert time.monotonic() < until_s, "\n".join(self.lines[-30:])
            assert self.process.poll() is None, "\n".join(self.lines[-30:])
            threading.Event().wait(0.05)

    def member(self, name: str) -> tuple[int, str]:
        """Return process id and URL of a member."""
        pid, url = next(line for line in self.lines if line.startswith(f"{name}: pid ")).split(": pid ")[1].split(", ")
        return int(pid), url.removesuffix("/v1")

    def metric(self, name: str) -> float:
        """Return the sum of a metric over those who generate."""
        total = 0.0
        for member in ("decode 0", "decode 1"):
            lines = httpx.get(self.member(member)[1] + "/metrics", timeout=PATIENCE_S).text.splitlines()
            total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
        return total

    def say(self, prompt: str) -> str:
        """Return what the official client is answered."""
        return self.client.completions.create(model="demo", prompt=prompt, timeout=PATIENCE_S, **GREEDY).choices[0].text

    def close(self) -> None:
        """End it as an operator does."""
        self.client.close()
        words = ["cluster", "down", "--port", str(self.port)]
        subprocess.run([sys.executable, "-m", "trencadis", *words], check=True, timeout=PATIENCE_S)
        assert self.process.wait(PATIENCE_S) == 0
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    one = ClusterProcess()
    try:
        one.until("Cluster ready")
        assert one.metric('trencadis_kv_prefill_engines{connector="p2p"') == 2, "each who generates knows one"
        yield one
        one.close()
    finally:
        one.process.kill()
        one.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[str], str]]:
    """Says what a single engine says, one in this process."""
    with LLM("demo", engine={"warmup": False}, cache={"num_blocks": 256, "block_size": 16}) as llm:
        yield lambda prompt: llm.generate(prompt, SamplingParams(**GREEDY))[0].outputs[0].text


@pytest.mark.nightly
def test_prompts_are_computed_elsewhere_and_answers_are_those_of_one_engine(
    cluster: ClusterProcess, alone: Callable[[str], str]
) -> None:
    prompts = [text_of(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(cluster.say, prompts))
    assert said == [alone(prompt) for prompt in prompts]
    assert cluster.metric('trencadis_kv_delegated_prefills_total{connector="p2p",result="served"') == 4
    assert cluster.metric('trencadis_transfer_first_tokens_total{result="taken"') == 4
    eventually(lambda: cluster.metric('trencadis_kv_pushed_bytes_total{connector="p2p",end="received"') > 0)
    eventually(lambda: cluster.metric('trencadis_kv_push_bytes{connector="p2p"') == 0)
    answer = cluster.client.completions.create(model="demo", prompt=text_of(9), stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in answer) == alone(text_of(9))


@pytest.mark.nightly
def test_prefill_process_that_is_killed_in_the_middle_costs_no_answer_and_comes_back(
    cluster: ClusterProcess, alone: Callable[[str], str]
) -> None:
    pids, prompts = family(cluster.member("prefill 0")[0]), [text_of(seed) for seed in range(30, 34)]
    assert len(pids) == 2
    send(signal.SIGSTOP, pids)  # whatever it gets from now on, it is in the middle of it
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(cluster.say, prompt) for prompt in prompts]
        eventually(lambda: cluster.metric('trencadis_kv_delegated_prefills_running{connector="p2p"') > 0)
        assert not all(answer.done() for answer in answers)
        send(signal.SIGKILL, pids)
        said = [answer.result(PATIENCE_S) for answer in answers]
    assert said == [alone(prompt) for prompt in prompts]
    assert cluster.metric('trencadis_kv_delegated_prefills_total{connector="p2p",result="failed"') >= 1
    served = cluster.metric('trencadis_kv_delegated_prefills_total{connector="p2p",result="served"')
    assert cluster.say(text_of(40)) == alone(text_of(40)), "without it"
    cluster.until("prefill 0 has ended (signal 9); it is started again.")
    cluster.until("serves again")
    cluster.until("computes prompts for this one", times=4)
    for seed in range(41, 51):
        assert cluster.say(text_of(seed)) == alone(text_of(seed))
        if cluster.metric('trencadis_kv_delegated_prefills_total{connector="p2p",result="served"') > served:
            return
    raise AssertionError("it is there again, and computes nothing")
