"""A rank's process as the executor sees it: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

from trencadis_plugins.executor.ranks.link import RankLink
from trencadis_plugins.executor.ranks.rank import Rank

__all__ = ["DUMP_SIGNAL", "RankProcess"]

DUMP_SIGNAL: Final = getattr(signal, "SIGUSR1", None)
"""Has a rank write the stacks of all its threads to standard error, whatever holds Python's lock."""

_PATIENCE_S: Final = 2.0


class RankProcess(Rank):
    """A child process with one rank.

    Args:
        rank: Which.
        local_rank: Which of all ranks on this machine, those of other replicas counted: told to the process, whose components may
            choose a device by it before they import anything, as ``TRENCADIS_LOCAL_RANK``.
    """

    def __init__(self, rank: int, *, local_rank: int = 0) -> None:
        own, other = socket.socketpair()
        with other:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "trencadis_plugins.executor.ranks", str(other.fileno())],
                stdin=subprocess.PIPE,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "TRENCADIS_LOCAL_RANK": str(local_rank),
                },
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
        super().__init__(rank, RankLink(own))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def is_stopped(self, now_s: float) -> bool:
        """Return whether a signal has stopped it."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()
        self.link.close()
