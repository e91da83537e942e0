"""The commands as users run them: ``trencadis serve`` until a signal, ``trencadis run-batch`` over the example."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from support.eventually import eventually
from support.server.raw_client import RawClient, body_of, status_of
from trencadis.api import last_start
from trencadis.cli import main

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300
CONFIG = """
[backend]
name = "support.core.paced_backend:PacedBackend"
[backend.options]
step_s = 0.01
[sampling]
name = "trencadis_testing.backend:ArgmaxSampler"
[engine]
warmup = false
[cache]
num_blocks = 512
block_size = 4
[server]
port = 0
"""
STREAM = {"model": "demo", "prompt": [5, 6], "max_tokens": 100, "stream": True}


class Serving:
    """A server process whose engine is ready."""

    def __init__(self, *flags: str, config: Path) -> None:
        command = [sys.executable, "-m", "trencadis", "serve", "--config", str(config), *flags]
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=ROOT
        )
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline()]
        self.url = self.lines[0].split()[2].removesuffix("/v1")
        self.port = int(self.url.rpartition(":")[2])
        while not self.lines[-1].startswith("Ready: "):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            self.lines.append(line)
        # What it logs must not fill the pipe.
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    config = tmp_path / "serve.toml"
    config.write_text(CONFIG)
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> Serving:
            serving = Serving(*flags, config=config)
            stack.callback(serving.close)
            return serving

        yield start


def test_a_list_of_keys_on_the_command_line_may_be_written_in_brackets(serve):
    serving = serve("--server.api-keys", '["ann:one,two", "bob:three"]')
    for key, status in (("one,two", 200), ("three", 200), ("two", 401), ("one", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{serving.url}/v1/models", headers=headers).status_code == status


def test_one_ledger_has_the_start_of_both_processes(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    began_s = time.monotonic()
    serving = serve("--log.level", "info")
    took_s = time.monotonic() - began_s
    lines = httpx.get(f"{serving.url}/metrics").text.splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if line.startswith("trencadis_start_seconds{"))
    phases = [name.split('"')[1] for name in shown]
    assert phases[:6] == ["python", "command", "server", "engine process", "engine's python", "engine's command"]
    assert phases[6] == "components"
    # It ends before the line is printed that this test waited for.
    assert 0 < sum(map(float, shown.values())) <= took_s + 0.02
    assert float(shown['trencadis_start_seconds{phase="engine process",cached=""}']) < sum(map(float, shown.values()))
    model, entries = last_start()
    assert (model, [entry.phase for entry in entries]) == ("demo", phases)
    assert serving.end() == 0
    (told,) = (line for line in serving.errors if "The start took" in line)
    assert re.search(r"took \d+\.\d\d s: python .*, server ", told)


def test_sigusr2_has_the_engine_write_a_flight_record_and_ends_nothing(serve, tmp_path):
    serving = serve("--flight_recorder.folder", str(tmp_path / "records"))
    serving.process.send_signal(signal.SIGUSR2)
    eventually(lambda: bool(list((tmp_path / "records").glob("*.flight"))))
    (path,) = (tmp_path / "records").glob("*.flight")
    assert path.name.endswith("-request.flight")
    assert httpx.get(f"{serving.url}/ready").status_code == 200
    assert serving.end() == 0


def test_it_says_where_it_listens_and_a_signal_lets_a_stream_end_before_it_exits_0(serve):
    serving = serve()
    assert serving.lines[0] == f"Listening at {serving.url}/v1 for demo; loading.\n"
    fingerprint = serving.lines[-1].split()[-1].rstrip(".")
    with RawClient(serving.port) as client:
        client.post("/v1/completions", STREAM)
        while b"data:" not in client.data:
            client.read(1000)
        serving.process.send_signal(signal.SIGTERM)
        streamed = client.read_all()
    assert serving.process.wait(TIMEOUT_S) == 0
    *_, last, done = body_of(streamed).strip().split(b"\n\n")
    assert done == b"data: [DONE]"
    chunk = json.loads(last.removeprefix(b"data: "))
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert chunk["system_fingerprint"] == f"fp_{fingerprint}"


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(serve):
    serving = serve("--server.drain-timeout-s", "3600")
    with RawClient(serving.port) as client:
        client.post("/v1/completions", {**STREAM, "max_tokens": 250})
        while b"data:" not in client.data:
            client.read(1000)
        serving.process.send_signal(signal.SIGINT)
        while httpx.get(f"{serving.url}/health").json()["status"] != "draining":
            pass
        with RawClient(serving.port) as late:
            late.post("/v1/completions", STREAM)
            assert status_of(late.read_all()) == 503
        assert serving.end() == 128 + signal.SIGTERM
    assert not any("Traceback" in line for line in serving.errors)


@pytest.mark.slow
def test_a_server_told_to_end_while_it_loads_does_so(tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "trencadis", "serve", "--config", str(config)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_a_model_that_cannot_be_loaded_ends_it_with_2_and_words(tmp_path):
    command = [sys.executable, "-m", "trencadis", "serve", "--port", "0", "--model.path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_example_batch_runs_on_the_demo_and_a_second_run_does_nothing(tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    command = ["run-batch", "-i", str(ROOT / "examples" / "batch.jsonl"), "-o", str(output)]
    assert main(command) == 0
    assert "6 answered, 0 failed, 0 done before" in capsys.readouterr().out
    whole = output.read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert {line["custom_id"] for line in lines} == {
        f"{kind}-{number}" for kind in ("chat", "completion", "embedding") for number in (1, 2)
    }
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
    output.write_bytes(whole[:-20])  # as if the power had gone
    assert main(command) == 0
    assert "1 answered, 0 failed, 5 done before" in capsys.readouterr().out
    assert len(output.read_bytes().splitlines()) == 6


def test_with_json_logs_every_line_is_an_object_also_those_of_the_engine(tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text(CONFIG + '[log]\nformat = "json"\nlevel = "debug"\n')
    command = [sys.executable, "-m", "trencadis", "serve", "--config", str(config)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = []

        def read_until(word: str) -> dict[str, object]:
            while True:
                lines.append(json.loads(process.stdout.readline()))
                if word in lines[-1]["message"]:
                    return lines[-1]

        url = str(read_until("Listening at ")["message"]).split()[2].removesuffix("/v1")
        read_until("Ready: ")
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 1}, headers={"x-request-id": "r7"}
        )
        assert answer.status_code == 200
        access = read_until("POST /v1/completions")
        process.send_signal(signal.SIGTERM)
        lines += map(json.loads, process.stdout)
        assert process.wait(TIMEOUT_S) == 0
    assert {access[name] for name in ("logger", "method", "path", "status", "request_id")} == {
        "trencadis.access",
        "POST",
        "/v1/completions",
        200,
        "r7",
    }
    assert access["duration_s"] > 0
    assert access["process"] == process.pid
    assert any(line["process"] != process.pid for line in lines), "the engine's process logs as well"
