"""The commands as users run them: ``trencadis serve`` until a signal, ``trencadis run-batch`` over the example."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from support.eventually import eventually
from support.server.raw_client import RawClient, body_of, status_of
from support.server.served_process import ServedProcess
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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "serve.toml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def serve(config: Path) -> Iterator[Callable[..., ServedProcess]]:
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> ServedProcess:
            server = ServedProcess("--config", str(config), *flags)
            stack.callback(server.close)
            return server.wait()

        yield start


def end(server: ServedProcess, number: int = signal.SIGTERM) -> int:
    """Send a signal and wait for the exit code."""
    server.process.send_signal(number)
    return server.process.wait(TIMEOUT_S)


def port_of(server: ServedProcess) -> int:
    return int(server.url.rpartition(":")[2])


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
    assert end(serving) == 0
    (told,) = (line for line in serving.errors if "The start took" in line)
    assert re.search(r"took \d+\.\d\d s: python .*, server ", told)


def test_it_says_where_it_listens_takes_keys_writes_a_record_and_lets_a_stream_end_before_it_exits_0(serve, tmp_path):
    records = tmp_path / "records"
    serving = serve("--flight_recorder.folder", str(records), "--server.api-keys", '["ann:one,two", "bob:three"]')
    for key, status in (("one,two", 200), ("three", 200), ("two", 401), ("one", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{serving.url}/v1/models", headers=headers).status_code == status
    serving.process.send_signal(signal.SIGUSR2)
    eventually(lambda: bool(list(records.glob("*-request.flight"))))
    assert httpx.get(f"{serving.url}/ready").status_code == 200
    assert serving.lines[0] == f"Listening at {serving.url}/v1 for demo; loading.\n"
    fingerprint = serving.lines[-1].split()[-1].rstrip(".")
    with RawClient(port_of(serving)) as client:
        client.post("/v1/completions", STREAM, "authorization: Bearer three")
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
    with RawClient(port_of(serving)) as client:
        client.post("/v1/completions", {**STREAM, "max_tokens": 250})
        while b"data:" not in client.data:
            client.read(1000)
        serving.process.send_signal(signal.SIGINT)
        while httpx.get(f"{serving.url}/health").json()["status"] != "draining":
            pass
        with RawClient(port_of(serving)) as late:
            late.post("/v1/completions", STREAM)
            assert status_of(late.read_all()) == 503
        assert end(serving) == 128 + signal.SIGTERM
    assert not any("Traceback" in line for line in serving.errors)


@pytest.mark.slow
def test_a_server_told_to_end_while_it_loads_does_so(config):
    with contextlib.closing(ServedProcess("--config", str(config))) as serving:
        assert serving.process.stdout is not None
        serving.process.stdout.readline()
        assert end(serving) == 0


def test_a_model_that_cannot_be_loaded_ends_it_with_2_and_words(tmp_path):
    command = [sys.executable, "-m", "trencadis", "serve", "--port", "0", "--model.path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_example_batch_runs_on_the_demo(tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", str(ROOT / "examples" / "batch.jsonl"), "-o", str(output)]) == 0
    assert "6 answered, 0 failed, 0 done before" in capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert {line["custom_id"] for line in lines} == {
        f"{kind}-{number}" for kind in ("chat", "completion", "embedding") for number in (1, 2)
    }
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)


def test_with_json_logs_every_line_is_an_object_also_those_of_the_engine(config):
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
