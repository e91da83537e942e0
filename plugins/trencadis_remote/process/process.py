"""The engine's process as its parent sees it: started, watched, ended.

    parent ── standard input: StartMessage, then open as long as the parent lives ──▶ child ends with it
    parent ◀── standard output: no_answer, open as long as the child lives ── child     parent hears its end at once

What the child prints goes to standard error: on a terminal through this process, see ``trencadis.screen``. It is in a session of its own, so Ctrl-C reaches the parent alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import weakref
from typing import Any

from trencadis.api import ENVIRONMENT_PREFIX, ActivityView, child_stderr, drain_children
from trencadis.errors import ConfigError, InvalidRequestError
from trencadis_remote.process.messages import StartMessage
from trencadis_remote.process.wire import encode
from trencadis_remote.watch.stall_watch import StallWatch

__all__ = ["LENGTH", "EngineProcess", "describe_exit"]

LENGTH = struct.Struct("<I")
"""Before the ``StartMessage``: its length in bytes."""

_MAX_PATH_BYTES = 90  # a socket's path may have 107 bytes
_PATIENCE_S = 2.0


class EngineProcess:
    """A child process with ``python -m trencadis_remote.process``. Used by one thread.

    Args:
        tables: The configuration.
        sources: Source of each value, for messages.
        log_levels: Levels of the child's log, such as ``info``, while it loads and afterwards.
        watchdog_s: Without progress for longer it is killed, seconds; see :class:`StallWatch`.
        sends_load: It sends messages about its load.

    Raises:
        ConfigError: A value that only this process can hold, such as an object.
    """

    def __init__(
        self,
        *,
        tables: dict[str, Any],
        sources: dict[str, str],
        log_levels: tuple[str, str],
        watchdog_s: float = 120.0,
        sends_load: bool = False,
    ) -> None:
        self._directory = _private_directory()
        self._view = ActivityView()
        try:
            start = encode(
                StartMessage(
                    address=self.address,
                    tables=tables,
                    sources=sources,
                    log_levels=log_levels,
                    python_path=os.environ.get("PYTHONPATH"),
                    activity_file=self._view.file,
                    sends_load=sends_load,
                )
            )
        except InvalidRequestError as error:
            os.rmdir(self._directory)
            self._view.close()
            raise ConfigError(
                f"[engine] placement = process: a value of the configuration cannot travel: {error}.",
                hint='Give plain numbers, texts, lists and tables, or set placement = "thread".',
            ) from error
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "trencadis_remote.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=child_stderr(),
            env=_environment(),
            start_new_session=True,
            bufsize=0,
            pass_fds=(self._view.file,),
        )
        self._view.close_file()
        child = self._child
        self._watch = StallWatch(child, self._view, watchdog_s=watchdog_s, kill=lambda: _kill(child))
        self._release = weakref.finalize(self, _release, child, self._directory, self._watch, self._view)
        self._watch.start()
        with contextlib.suppress(BrokenPipeError):  # its end is detected by fileno
            _write(self._child.stdin, LENGTH.pack(len(start)) + start)

    @property
    def address(self) -> str:
        """Of the socket between the two; in a directory of mode 0700."""
        return f"ipc://{self._directory}/engine"

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def fileno(self) -> int:
        """Return a file that becomes readable when the child has ended."""
        return _fileno(self._child.stdout)

    @property
    def progress(self) -> tuple[int, int | None]:
        """Number of buckets that the child has prepared, and of all buckets, if known."""
        reading = self._view.read()
        return reading.done, reading.total or None

    @property
    def part(self) -> str:
        """The part of loading that the child runs, such as ``weights``; empty if it has not said."""
        return self._view.read().part

    @property
    def stalled(self) -> str:
        """Where the child has made no progress for too long; empty while all is well."""
        return self._watch.stalled

    def describe_end(self) -> str:
        """Return how the child ended, and the plugin call it was in; to be called when :meth:`fileno` is readable."""
        try:
            code = self._child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            _kill(self._child)
            code = self._child.wait()
        return self._watch.verdict or f"{describe_exit(code)}{self._view.read().called}"

    def close(self) -> None:
        """Terminate the child, kill it if it does not end, and remove the directory; may be called twice."""
        if self._child.poll() is None:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_PATIENCE_S)
        self._release()
        drain_children()


def describe_exit(code: int) -> str:
    """Return an exit code in words: ``was killed by SIGKILL; often the kernel ran out of memory``. Pure.

    Args:
        code: As ``subprocess`` has it: negative for a signal.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{'; often the kernel ran out of memory' if code == -signal.SIGKILL else ''}"


def _environment() -> dict[str, str]:
    """Return the environment without the variables of Trencadís: the tables hold the values, and some are secrets."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    return {**environment, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _private_directory() -> str:
    directory = tempfile.mkdtemp(prefix="trencadis-")  # mode 0700
    if len(os.fsencode(directory)) > _MAX_PATH_BYTES:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="trencadis-", dir="/tmp")
    return directory


def _write(pipe: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def _fileno(pipe: Any) -> int:
    number: int = pipe.fileno()
    return number


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child and what it has started, which is in its session."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _release(child: subprocess.Popen[bytes], directory: str, watch: StallWatch, view: ActivityView) -> None:
    """End the child and free its pipes, descriptors and directory; also runs where ``close`` was not called."""
    watch.close()
    if child.poll() is None:
        _kill(child)
        child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    view.close()
    shutil.rmtree(directory, ignore_errors=True)
