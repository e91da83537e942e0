"""``trencadis serve`` as a process of its own, with all that it starts; killed without mercy if asked to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import httpx

__all__ = ["ServedProcess", "family", "send"]

_TIMEOUT_S = 300
_ROOT = Path(__file__).parents[3]


class ServedProcess:
    """A server that runs, once :meth:`wait` has returned; it may import what is under ``tests``.

    Args:
        flags: Of ``trencadis serve``.

    Attributes:
        url: Where it listens.
        lines: What it has printed until it served.
        errors: What it has logged, line by line.
    """

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trencadis", "serve", "--server.port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT / "tests")},
            cwd=_ROOT,
            start_new_session=True,
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        self.url = ""
        self.lines: list[str] = []

    def wait(self) -> Self:
        """Wait until it serves."""
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline()]
        assert self.lines[0].startswith("Listening at "), (self.lines, self.errors)
        self.url = self.lines[0].split()[2].removesuffix("/v1")
        while not self.lines[-1].startswith("Ready: "):
            self.lines.append(self.process.stdout.readline())
            assert self.lines[-1], self.errors
        return self

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """Send a request and wait for the answer."""
        return httpx.post(self.url + path, json={"model": "demo", **body}, timeout=_TIMEOUT_S)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples that begin with ``name``; 0 without one."""
        lines = httpx.get(self.url + "/metrics", timeout=_TIMEOUT_S).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def kill(self) -> None:
        """Kill it and what it started."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait(_TIMEOUT_S)

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it started."""
        send(number, family(self.process.pid))

    def close(self) -> None:
        """End it, if it has not ended."""
        self.kill()
        self._reader.join(_TIMEOUT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr


def family(pid: int) -> list[int]:
    """Return a process and its children; a server's engine lives in a process and a session of its own."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children += map(int, task.read_text().split())
    return [pid, *children]


def send(number: int, pids: list[int]) -> None:
    """Send a signal to all that still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
