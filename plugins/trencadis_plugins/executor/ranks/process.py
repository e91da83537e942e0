"""A rank's process as the executor sees it: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final, Protocol

from trencadis.screen import child_stderr
from trencadis_plugins.executor.ranks.link import RankLink
from trencadis_plugins.executor.ranks.rank import Rank

__all__ = ["DUMP_SIGNAL", "UNKNOWN_CODE", "ChildProcess", "RankProcess", "is_stopped", "kill_session", "run_module"]

DUMP_SIGNAL: Final = getattr(signal, "SIGUSR1", None)
"""Has a rank write the stacks of all its threads to standard error, whatever holds Python's lock."""

UNKNOWN_CODE: Final = 256
"""Exit code of a process whose parent has ended."""

_PATIENCE_S: Final = 2.0


class ChildProcess(Protocol):
    """A process that leads a session of its own; ``subprocess.Popen`` is one."""

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

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        ...


class RankProcess(Rank):
    """A process of this machine with one rank.

    Args:
        rank: Which.
        child: Process of the rank.
        end: This end of the sockets.
    """

    def __init__(self, rank: int, child: ChildProcess, end: socket.socket) -> None:
        super().__init__(rank, RankLink(end))
        self._child = child

    @classmethod
    def spawned(cls, rank: int, *, local_rank: int = 0) -> RankProcess:
        """Start a rank in a fresh interpreter.

        Args:
            rank: Which.
            local_rank: Which of all ranks on this machine, those of other replicas counted: told to the process as
                ``TRENCADIS_LOCAL_RANK``, for components that choose a device before they import anything.
        """
        own, other = socket.socketpair()
        with other:
            return cls(rank, run_module(other, TRENCADIS_LOCAL_RANK=str(local_rank)), own)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def is_stopped(self, now_s: float, *, is_starting: bool) -> bool:
        """Return whether a signal has stopped it."""
        return is_stopped(self.pid)

    def dump_stacks(self) -> None:
        """Have it write the stacks of its threads to standard error, if it lives."""
        if DUMP_SIGNAL is not None:
            self._child.send_signal(DUMP_SIGNAL)

    def describe_end(self) -> str:
        """Return how it ended, in words, once its link is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_PATIENCE_S)
        code = self._child.poll()
        if code is None:
            return "closed its connection"
        if code == UNKNOWN_CODE:
            return "ended; what it was forked from, which knows how, ended before"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}{'; often the kernel ran out of memory' if code == -signal.SIGKILL else ''}"

    def kill(self) -> None:
        """End it and what it started, at once; may be called twice."""
        if self._child.poll() is None:
            kill_session(self.pid)
            self._child.wait()
        self.link.close()


def run_module(end: socket.socket, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start ``python -m trencadis_plugins.executor.ranks`` with one end of a pair of sockets, and more environment variables."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "trencadis_plugins.executor.ranks", str(end.fileno()), *arguments],
        stdin=subprocess.PIPE if arguments else subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), **variables},
        stderr=child_stderr(),
        pass_fds=(end.fileno(),),
        start_new_session=True,
    )


def kill_session(pid: int) -> None:
    """End a process that leads a session, or is about to, and the others in it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; one that a debugger holds counts as running."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"
