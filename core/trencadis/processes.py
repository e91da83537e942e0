"""Child processes: started, asked, judged from outside, ended with all that they have started, and started again.

Each is the leader of a session of its own, so that Ctrl-C reaches its parent alone, and what it has started ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from trencadis.screen import child_stderr, drain_children

__all__ = [
    "DUMP_SIGNAL",
    "ChildProcess",
    "LineProcess",
    "RestartLimit",
    "close_pipes",
    "describe_exit",
    "end_process",
    "is_stopped",
    "kill_process",
    "kill_session",
    "process_state",
    "spawn",
]

DUMP_SIGNAL: Final = getattr(signal, "SIGUSR1", None)
"""Has a process of ours write the stacks of all its threads to standard error, whatever holds Python's lock."""

_PATIENCE_S: Final = 2.0


class ChildProcess(Protocol):
    """A process that leads a session; ``subprocess.Popen`` is one, what a template has forked another. From any thread."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not within some seconds.
        """
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, unless it has ended."""
        ...


def spawn(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a session of its own; it finds the modules that this process finds.

    Args:
        module: Run as a program.
        arguments: Command line.
        environment: Variables, to which ``PYTHONPATH`` is added.
        stdin: Descriptor, or a constant of ``subprocess``.
        stdout: The same; None: that of this process.
        pass_fds: Descriptors that it inherits.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=child_stderr(),
        env={**environment, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        start_new_session=True,
        bufsize=0,
        pass_fds=pass_fds,
    )


# ------------------------------------------------------------------------------------------------------------ state


def process_state(pid: int, key: str) -> str:
    """Return a line of ``/proc/PID/status``; empty where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # there is none, it is not ours to read, or the process has ended
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")), "")


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, which then makes no progress; one that a debugger holds counts as running."""
    return process_state(pid, "State").startswith("T")


def describe_exit(code: int) -> str:
    """Return an exit code in words: ``was killed by SIGKILL; often the kernel ran out of memory``. Pure.

    Args:
        code: Exit code of ``subprocess``: negative for a signal.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{'; often the kernel ran out of memory' if code == -signal.SIGKILL else ''}"


# -------------------------------------------------------------------------------------------------------------- end


def kill_session(pid: int) -> None:
    """End a process that leads a session, or is about to, and the others in it; nothing happens if they have ended."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_process(child: ChildProcess) -> int:
    """End a child and what it has started, at once, and return its exit code; nothing happens if it has ended."""
    if child.poll() is None:
        kill_session(child.pid)
    return child.wait()


def end_process(child: subprocess.Popen[bytes]) -> None:
    """Ask a child to end, kill it if it does not within 2 s, and close its pipes; may be called twice."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_PATIENCE_S)
    kill_process(child)
    close_pipes(child)
    drain_children()


def close_pipes(child: subprocess.Popen[bytes]) -> None:
    """Close the pipes of a child that has ended; may be called twice."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written yet
                pipe.close()


# ------------------------------------------------------------------------------------------------ a line for a line

_RUNNING: Final[set[subprocess.Popen[bytes]]] = set()


class LineProcess:
    """A process that answers each line with a line, for work that only a process can bound. Used by one thread.

    It is started on demand, and again after it has ended.

    Args:
        file: A Python program; by its file, since importing a package may take longer than the work.
        environment: Variables, to which ``PYTHONPATH`` is added.
        setup: Called at each start; returns what the process is sent first.
    """

    def __init__(self, file: Path, *, environment: Mapping[str, str], setup: Callable[[], bytes]) -> None:
        self._file = file
        self._environment = environment
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes, *, timeout_s: float) -> bytes | int:
        """Return the answer to a line; the exit code if the process ended instead, or was killed because time was up."""
        process = self._started()
        answer = _exchange(process, line, time.monotonic() + timeout_s)
        if answer:
            return answer
        process.kill()
        code = process.wait()
        self.close()
        return code

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _RUNNING.discard(process)
            _end(process)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended by itself after work that took much memory
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(self._file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**self._environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            _RUNNING.add(self._process)
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.write(self._setup())
        return self._process


@atexit.register
def _end_all() -> None:
    while _RUNNING:
        _end(_RUNNING.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    close_pipes(process)


def _exchange(process: subprocess.Popen[bytes], line: bytes, deadline_s: float) -> bytes:
    """Return the line that answers a line; empty if the other end closes or time is up."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except OSError:  # it has ended
        return b""
    file, poll, parts = process.stdout.fileno(), select.poll(), [b""]
    poll.register(file, select.POLLIN)
    while not parts[-1].endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            return b""
        parts.append(os.read(file, 65_536))
        if not parts[-1]:
            return b""
    return b"".join(parts)


# ------------------------------------------------------------------------------------------------------- start again


class RestartLimit:
    """At most so many restarts of one thing within a time. From any thread.

    Args:
        max_restarts: Restarts within ``window_s``; 0: there is never one.
        window_s: Seconds.
        now_s: Measures them; need not run on while nothing serves.
    """

    def __init__(self, *, max_restarts: int, window_s: float, now_s: Callable[[], float]) -> None:
        self.max_restarts = max_restarts
        self._window_s = window_s
        self._now_s = now_s
        self._begun_s: deque[float] = deque()
        self._lock = threading.Lock()

    @property
    def num_recent(self) -> int:
        """Restarts within the window."""
        with self._lock:
            return self._forget(self._now_s())

    def note(self) -> bool:
        """Count a restart; returns whether it is within the limit."""
        with self._lock:
            now_s = self._now_s()
            self._begun_s.append(now_s)
            return self._forget(now_s) <= self.max_restarts

    def delay_s(self) -> float | None:
        """Return how long the next restart has to wait so that the limit holds, seconds, and count it; None: there is none."""
        if not self.max_restarts:
            return None
        with self._lock:
            now_s = self._now_s()
            num_recent = self._forget(now_s)
            begin_s = now_s
            if num_recent >= self.max_restarts:
                begin_s = self._begun_s[num_recent - self.max_restarts] + self._window_s
            self._begun_s.append(begin_s)
            return begin_s - now_s

    def _forget(self, now_s: float) -> int:
        while self._begun_s and now_s - self._begun_s[0] >= self._window_s:
            self._begun_s.popleft()
        return len(self._begun_s)
