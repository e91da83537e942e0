"""The commands that users type first, with the demo model: CPU seconds until text is there, or a server is ready. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["command_starts"]

GENERATE = "trencadis generate"
SERVE = "trencadis serve"
TIMEOUT_S = 300.0


def command_starts(times: int, env: Mapping[str, str], *, first_counts: bool = False) -> list[dict[str, Any]]:
    """Start each command some times; returns ``command``, ``wall_s`` and ``cpu_s`` of each start.

    Args:
        times: How often.
        env: What the commands find in their environment besides ours.
        first_counts: The files are taken to be in memory; else each is started once before, for nothing.
    """
    found = []
    for number in range(first_counts, times + 1):
        for name, measure in ((GENERATE, _generate), (SERVE, _serve)):
            start_s = time.monotonic()
            cpu_s = measure({**os.environ, **env})
            if number:
                found.append({"command": name, "wall_s": time.monotonic() - start_s, "cpu_s": cpu_s})
    return found


def _generate(env: Mapping[str, str]) -> float:
    """Return the CPU time of a whole command, with all processes that it started and waited for."""
    command = [sys.executable, "-m", "trencadis", "generate", "--no-stream", "--max-tokens", "8", "The old man"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{GENERATE} ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime


def _serve(env: Mapping[str, str]) -> float:
    """Return the CPU time of a server and its engine when it says that it is ready; then it is ended."""
    command = [sys.executable, "-m", "trencadis", "serve", "--port", "0"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        if not any(line.startswith("Ready") for line in process.stdout):
            raise RuntimeError(f"{SERVE} ended before it was ready")
        return sum(map(_cpu_s, _family(process.pid)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        process.wait(TIMEOUT_S)


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in task.read_text().split():
                found += _family(int(child))
    return found


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, with its children that have ended and were waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
