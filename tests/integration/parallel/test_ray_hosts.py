"""A Ray cluster of several hosts that asks for a token: ranks on two of them, and a host that nothing is heard of any more.

Hosts are network namespaces; a pulled cable is a host that has no power: no FIN, no RST, and Ray itself notices it after half a minute.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.eventually import eventually
from support.netns import Host, hosts
from trencadis import LLM, SamplingParams

pytest.importorskip("ray", reason='Ray is not installed: pip install "trencadis[ray]"')

pytestmark = pytest.mark.nightly

TOKEN = "0123456789abcdef0123456789abcdef"
PROMPTS = ("The ship sails", "Once upon a time", "In the morning", "A captain")
START_S = 300.0
PORT = 6379


def environment(**more: str) -> dict[str, str]:
    """Return one for Ray and the server; whatever else listens on this machine is not theirs."""
    path = os.pathsep.join(filter(None, sys.path))
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**mine, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **more}


WITH_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


class Nodes:
    """A Ray cluster with two cores on each host; the first is its head."""

    def __init__(self, machines: tuple[Host, ...]) -> None:
        self.machines = machines
        self._folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # the paths of Ray's sockets are long
        # One after the other: nodes of one machine share a folder, and those that start together get in each other's way.
        for machine in machines:
            self._start(machine)

    def _start(self, machine: Host) -> None:
        """Start a node; returns once it has joined."""
        head = self.machines[0]
        joined = [f"--address={head.address}:{PORT}"]
        if machine is head:
            joined = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        command = [*joined, f"--node-ip-address={machine.address}", "--num-cpus=2", "--object-store-memory=80000000"]
        with machine.entered():
            ended = subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *command],
                env=environment(**WITH_TOKEN),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        assert ended.returncode == 0, ended.stdout

    def close(self) -> None:
        for pid in (pid for machine in self.machines for pid in processes_on(machine)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


def processes_on(machine: Host) -> list[int]:
    """Return the processes in a host's namespace."""
    shown = subprocess.run(["ip", "netns", "pids", machine._name], capture_output=True, text=True, check=True).stdout
    return [int(word) for word in shown.split()]


class Served:
    """``trencadis serve`` over Ray on the head's host."""

    def __init__(self, machine: Host, *flags: str) -> None:
        self._machine = machine
        self.lines: list[str] = []
        with machine.entered():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trencadis", "serve", "--model.path=demo", "--server.port=0", "--executor.name=ray",
                 f"--executor.ray.address={machine.address}:{PORT}", *flags],
                env=environment(**WITH_TOKEN), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        self._port = 0
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(START_S)
        if "Ready: " not in self.log:
            self.close()
            pytest.fail(self.log)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if found := re.match(r"Listening at http://[^ ]*:(\d+)/", line):
                self._port = int(found[1])
            if "Ready: " in line:  # Ray's lines go to the same pipe, and may have no end yet
                self._ready.set()
        self._ready.set()

    def complete(self, prompt: str, max_tokens: int) -> str:
        """Return the text of a greedy request, sent on the server's host."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        with self._machine.entered():
            answer = httpx.post(f"http://127.0.0.1:{self._port}/v1/completions", json=body, timeout=START_S)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join()
            self._process.stdout.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with hosts(3) as machines:
        made = Nodes(machines)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def served(nodes: Nodes) -> Iterator[Served]:
    # Two cores a rank: each has a host to itself.
    made = Served(nodes.machines[0], "--parallel.tensor=2", "--executor.ray.num_cpus=2")
    try:
        yield made
    finally:
        made.close()


def expected(max_tokens: int) -> list[str]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    with LLM(**{"observer.names": []}) as llm:
        return [one.outputs[0].text for one in llm.generate(list(PROMPTS), params)]


def ranks_on(machine: Host) -> int:
    found = 0
    for pid in processes_on(machine):
        with contextlib.suppress(OSError):
            found += b"RankActor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def test_ranks_on_two_hosts_give_the_texts_of_one_process_and_their_logs_are_the_engines(nodes):
    # On a busy machine a rank that loads may give no sign of life for longer than the eight seconds of the default.
    flags = ("--parallel.tensor=2", "--executor.ray.num_cpus=2", "--executor.ray.heartbeat_timeout_s=60")
    with contextlib.closing(Served(nodes.machines[0], *flags)) as served:
        assert [served.complete(prompt, 16) for prompt in PROMPTS] == expected(16)
        assert sorted(map(ranks_on, nodes.machines)) == [0, 1, 1]
        assert "2 ranks on 2 nodes of the Ray cluster" in served.log
        eventually(
            lambda: re.search(r"\(RankActor pid=\d+(, ip=10\.99\.0\.\d)?\).*Ranks divide \d+ %", served.log) is not None
        )


def test_a_host_that_is_gone_costs_no_request_and_its_rank_starts_on_another(served, nodes):
    texts = expected(150)
    lost = next(machine for machine in nodes.machines[1:] if ranks_on(machine))
    (spare,) = [machine for machine in nodes.machines if not ranks_on(machine)]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        waiting = [pool.submit(served.complete, prompt, 150) for prompt in PROMPTS]
        lost.unplug()
        assert [one.result() for one in waiting] == texts
    assert ranks_on(spare) == 1
    assert re.search(r"Lost the ranks: rank \d sent no sign of life|Lost the ranks: rank \d ended", served.log), (
        served.log
    )
    lost.plug_in()


def test_ranks_of_a_replica_are_packed_and_replicas_are_spread(nodes):
    made = Served(nodes.machines[0], "--parallel.data=2", "--parallel.tensor=2")
    try:
        assert sorted(map(ranks_on, nodes.machines)) == [0, 2, 2]
        assert [made.complete(prompt, 16) for prompt in PROMPTS] == expected(16)
    finally:
        made.close()


def test_without_the_token_the_error_says_what_to_set(nodes):
    machine = nodes.machines[0]
    command = [sys.executable, "-m", "trencadis", "generate", "A", "--executor.name=ray"]
    command += [f"--executor.ray.address={machine.address}:{PORT}", "--parallel.tensor=2"]
    for given in ({"RAY_AUTH_MODE": "token", "HOME": "/nonexistent"}, {**WITH_TOKEN, "RAY_AUTH_TOKEN": "f" * 32}):
        more: dict[str, Any] = dict(given)
        with machine.entered():
            ended = subprocess.run(command, env=environment(**more), capture_output=True, text=True, check=False)
        assert ended.returncode != 0
        assert "RAY_AUTH_TOKEN" in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr
