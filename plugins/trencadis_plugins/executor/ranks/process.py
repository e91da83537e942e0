"""A rank's process as the executor sees it: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from typing import Final

from trencadis.link import Link
from trencadis.processes import DUMP_SIGNAL, ChildProcess, describe_exit, is_stopped, kill_process, spawn
from trencadis_plugins.executor.ranks.rank import Rank

__all__ = ["UNKNOWN_CODE", "RankProcess", "run_module"]

UNKNOWN_CODE: Final = 256
"""Exit code of a process whose parent has ended."""

_PATIENCE_S: Final = 2.0


class RankProcess(Rank):
    """A process of this machine with one rank.

    Args:
        rank: Which.
        child: Process of the rank.
        end: This end of the sockets.
    """

    def __init__(self, rank: int, child: ChildProcess, end: socket.socket) -> None:
        super().__init__(rank, Link(end))
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
        return describe_exit(code)

    def kill(self) -> None:
        """End it and what it started, at once; may be called twice."""
        kill_process(self._child)
        self.link.close()


def run_module(end: socket.socket, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start ``python -m trencadis_plugins.executor.ranks`` with one end of a pair of sockets, and more environment variables."""
    return spawn(
        "trencadis_plugins.executor.ranks",
        str(end.fileno()),
        *arguments,
        environment={**os.environ, **variables},
        stdin=subprocess.PIPE if arguments else subprocess.DEVNULL,
        pass_fds=(end.fileno(),),
    )
