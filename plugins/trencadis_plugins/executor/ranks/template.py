"""A process that has imported what ranks need, and forks each of them.

    executor   a rank's end of its sockets ──▶ template   fork ──▶ rank   runs at once
               process id                  ◀──
               process id, once it has ended ──▶          its exit code, which only a parent learns
               exit code                   ◀──

A fresh interpreter imports for seconds; a fork takes milliseconds. The template makes no backend, so it has no device and no threads.
It ends with the executor's process, and ends its ranks then, those that SIGSTOP has stopped included; ranks go on without it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from trencadis.errors import BackendError
from trencadis.link import wait_for_end
from trencadis.processes import is_stopped, kill_session
from trencadis_plugins.executor.ranks.process import UNKNOWN_CODE, RankProcess, run_module

__all__ = ["CAN_FORK", "RankTemplate", "TemplateEndedError", "end_with_executor", "run_template", "wake_template"]

CAN_FORK: Final = hasattr(os, "fork") and hasattr(os, "pidfd_open") and hasattr(socket, "recv_fds")

_NUMBER: Final = struct.Struct("<q")
_START: Final = 0
_LOOK_S: Final = 0.5


class TemplateEndedError(Exception):
    """The template has ended.

    Attributes:
        is_useless: By itself, so another one would as well.
    """

    def __init__(self, code: int) -> None:
        self.is_useless = code >= 0
        how = f"with exit code {code}; ranks start without it, which takes longer" if self.is_useless else "by a signal"
        super().__init__(f"The process that ranks are forked from ended {how}")


class RankTemplate:
    """The template as the executor sees it. Used by one thread at a time.

    Args:
        preload: Called there before the first fork; can be pickled.

    Attributes:
        has_forked: Whether it has started a rank.
    """

    def __init__(self, preload: Callable[[], None]) -> None:
        self.has_forked = False
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        data = pickle.dumps(preload, protocol=5)
        with other:
            self._process = run_module(other, "template")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # its end is noticed by the first call
            pipe.write(data)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can fork; one that SIGSTOP has stopped is ended."""
        if self._process.poll() is None and is_stopped(self.pid):
            self._process.kill()
            self._process.wait()
        return self._process.poll() is None

    def fork(self, rank: int) -> RankProcess:
        """Start a rank; returns once its process is there, so the first call waits for the imports.

        Raises:
            TemplateEndedError: There is no process any more.
            BackendError: The system starts no more processes.
        """
        own, other = socket.socketpair()
        try:
            with other:
                pid = self._ask(_START, other.fileno())
            if pid < 0:
                raise BackendError(f"Rank {rank} could not be started: {os.strerror(-pid)}.")
            self.has_forked = True
            return RankProcess(rank, _ForkedProcess(self, pid), own)
        except BaseException:
            own.close()
            raise

    def exit_code(self, pid: int) -> int:
        """Return that of a rank that has ended.

        Raises:
            TemplateEndedError: Nobody knows it.
        """
        return self._ask(pid)

    def close(self) -> None:
        """End it; may be called twice."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, number: int, *files: int) -> int:
        try:
            socket.send_fds(self._control, [_NUMBER.pack(number)], files)
            while not select.select([self._control], [], [], _LOOK_S)[0]:
                if not self.is_alive:
                    break
            answer = self._control.recv(_NUMBER.size)
        except OSError:
            answer = b""
        if not answer:
            raise TemplateEndedError(self._process.wait())
        found: int = _NUMBER.unpack(answer)[0]
        return found


class _ForkedProcess:
    """A process that the template has forked, with the methods of ``subprocess.Popen``."""

    def __init__(self, template: RankTemplate, pid: int) -> None:
        self.pid = pid
        self._template = template
        self._code: int | None = None
        try:
            self._file = os.pidfd_open(pid)  # the template keeps its number until it is asked for its exit code
        except ProcessLookupError as error:  # both are gone
            raise TemplateEndedError(-signal.SIGKILL) from error

    def poll(self) -> int | None:
        if self._code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not _readable(self._file, timeout):
                raise subprocess.TimeoutExpired("a rank", timeout or 0)
            try:
                self._code = self._template.exit_code(self.pid)
            except TemplateEndedError:
                self._code = UNKNOWN_CODE
            os.close(self._file)
        return self._code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, sig)


def _readable(file: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def run_template(control: socket.socket) -> tuple[socket.socket, int] | None:
    """Fork ranks until the executor is gone; returns in each of them.

    Args:
        control: To the executor; what to preload comes through standard input.

    Returns:
        In a rank its end of the sockets and the process id of the template; None in the template itself.
    """
    pickle.loads(sys.stdin.buffer.read())()
    if threading.active_count() > 1:
        raise BackendError(f"The backend's preload left threads: {', '.join(map(str, threading.enumerate()[1:]))}.")
    gc.collect()
    gc.freeze()  # a collection would write to every page that is shared with the ranks
    template, children = os.getpid(), set[int]()
    while True:
        try:
            data, files, _, _ = socket.recv_fds(control, _NUMBER.size, 1)
        except OSError:
            data = b""
        if not data:
            break
        number = _NUMBER.unpack(data)[0]
        if number == _START:
            answer = _fork()
            if not answer:
                control.close()
                return socket.socket(fileno=files[0]), template
            os.close(files[0])
            if answer > 0:
                children.add(answer)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
            children.discard(number)
        with contextlib.suppress(OSError):
            control.send(_NUMBER.pack(answer))
    for child in children:
        kill_session(child)
    return None


def _fork() -> int:
    """Return 0 in a new process that leads a session of its own, and its id here; negative: the number of an error."""
    try:
        child = os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)
    if not child:
        os.setsid()
    return child


def end_with_executor(link: Any, template: int) -> None:
    """Wait until the executor's end of a rank's sockets is closed, and end this process at once, whatever it does."""
    wait_for_end(link)
    wake_template(template)
    os._exit(1)


def wake_template(template: int) -> None:
    """Let a template that SIGSTOP has stopped go on: it notices that the executor has ended, and ends its other ranks.

    Args:
        template: Process id; 0: this rank was not forked.
    """
    if template and os.getppid() == template:
        with contextlib.suppress(ProcessLookupError):
            os.kill(template, signal.SIGCONT)
