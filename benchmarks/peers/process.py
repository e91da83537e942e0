"""A driver in a process group of its own: asked over pipes, stopped while others are measured, its CPU time read from outside.

CPU time and memory are those of the whole session of processes, so an engine that starts workers is charged for them. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["DriverError", "DriverProcess"]

CHILDREN_TIMES = slice(13, 15)  # of the same: user and system time of children that were waited for
STAT_FIELDS_BEFORE_SESSION = 3  # of those after the name in /proc/PID/stat: state, parent, process group, session


class DriverError(Exception):
    """A driver said no, died or did not answer; the message is what a reader of the table is told."""


class DriverProcess:
    """One engine.

    Args:
        command: Program and arguments.
        env: Its environment.
        log: File that takes what the driver and its libraries print.
        directory: Where it runs.

    Raises:
        DriverError: The program cannot be run.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path, directory: Path) -> None:
        self._log = log
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self._stdin, self._stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb", buffering=0)
        self._received = b""
        try:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs_in,
                    stdout=theirs_out,
                    stderr=errors,
                    env=dict(env),
                    cwd=directory,
                    start_new_session=True,
                )
        except OSError as error:
            self._close_pipes()
            raise DriverError(f"{command[0]} cannot be run: {error.strerror}") from None
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    @property
    def pids(self) -> list[int]:
        """Processes of the driver's session, its own first."""
        found = [self._process.pid]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._process.pid:
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[STAT_FIELDS_BEFORE_SESSION]) == self._process.pid:
                        found.append(int(entry.name))
        return found

    def cpu_s(self) -> float:
        """CPU time of all threads of all processes alive (the clock of a process: see clock_getcpuclockid(3))."""
        total = 0.0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                total += time.clock_gettime((~pid << 3) | 2)
        return total

    def ended_cpu_s(self) -> float:
        """CPU time of processes that these started and waited for, such as compilers, to a tick of the system. Source: proc(5)."""
        ticks = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[CHILDREN_TIMES]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory now and at its highest, summed over the processes."""
        names = {"VmRSS:": "rss", "VmHWM:": "peak_rss"}
        found = dict.fromkeys(names.values(), 0)
        for pid in self.pids:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith(tuple(names)):
                        name, kib, _ = line.split()
                        found[names[name]] += 1024 * int(kib)
        return found

    def ask(self, do: str, *, timeout_s: float, **question: Any) -> dict[str, Any]:
        """Ask and return the reply, with the CPU time that it took as ``cpu_s``.

        Raises:
            DriverError: The driver said no, died or did not answer in time. The last two end it.
        """
        start_cpu_s = self.cpu_s()
        try:
            self._stdin.write(json.dumps({"do": do, **question}).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None
        reply = self._reply(time.monotonic() + timeout_s, f"{do} took more than {timeout_s:g} s")
        if reply["reply"] == "error":
            raise DriverError(str(reply["message"]))
        return {**reply, "cpu_s": self.cpu_s() - start_cpu_s}

    def _reply(self, until_s: float, late: str) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._received.partition(b"\n")
                if newline:
                    self._received = rest
                    if line.startswith(b'{"reply"'):  # a native library may write past what a driver redirects
                        found: dict[str, Any] = json.loads(line)
                        return found
                    continue
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    self.close()
                    raise DriverError(late)
                if not (received := os.read(self._stdout.fileno(), 1 << 20)):
                    raise self._dead()
                self._received += received

    def _dead(self) -> DriverError:
        code = self._process.wait()
        text = self._log.read_text(errors="replace").strip()
        last = text.splitlines()[-1] if text else "it printed nothing"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        return DriverError(f"the process ended with {how}: {last[-300:]}")

    def pause(self) -> None:
        """Stop the processes, so that threads which poll take nothing from who is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the processes, all that the driver started too."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
