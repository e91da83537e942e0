"""The engine's process as its parent sees it: started, watched, ended.

    parent ◀── channel: StartMessage first, open as long as both live ──▶ child      child ends with its parent
    parent ◀── standard output: nothing, open as long as the child lives ── child     parent hears its end at once

What the child prints goes to standard error: on a terminal through this process, see ``trencadis.screen``. It is in a session of its own, so Ctrl-C reaches the parent alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import weakref
from typing import Any

from trencadis.activity import ActivityView
from trencadis.api import ENVIRONMENT_PREFIX
from trencadis.errors import ConfigError, InvalidRequestError
from trencadis.processes import close_pipes, describe_exit, end_process, kill_process, spawn
from trencadis_remote.process.channel import Channel
from trencadis_remote.process.messages import StartMessage
from trencadis_remote.process.wire import encode
from trencadis_remote.watch.stall_watch import StallWatch

__all__ = ["EngineProcess"]

_PATIENCE_S = 2.0


class EngineProcess:
    """A child process with ``python -m trencadis_remote.process``. Used by one thread.

    Args:
        tables: The configuration.
        sources: Source of each value, for messages.
        log_levels: Levels of the child's log, such as ``info``, while it loads and afterwards.
        watchdog_s: Without progress for longer it is killed, seconds; see :class:`StallWatch`.
        sends_load: It sends messages about its load.
        never_waits: See :class:`Channel`.

    Attributes:
        channel: To the child.

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
        never_waits: bool = False,
    ) -> None:
        self._view = ActivityView()
        try:
            start = encode(
                StartMessage(
                    tables=tables,
                    sources=sources,
                    log_levels=log_levels,
                    python_path=os.environ.get("PYTHONPATH"),
                    activity_file=self._view.file,
                    sends_load=sends_load,
                )
            )
        except InvalidRequestError as error:
            self._view.close()
            raise ConfigError(
                f"[engine] placement = process: a value of the configuration cannot travel: {error}.",
                hint='Give plain numbers, texts, lists and tables, or set placement = "thread".',
            ) from error
        own, other = socket.socketpair()
        self.channel = Channel(own, never_waits=never_waits)
        self._child = spawn(
            "trencadis_remote.process",
            str(other.fileno()),
            environment=_environment(),
            stdout=subprocess.PIPE,
            pass_fds=(self._view.file, other.fileno()),
        )
        other.close()
        self._view.close_file()
        child = self._child
        self._watch = StallWatch(child, self._view, watchdog_s=watchdog_s, kill=lambda: kill_process(child))
        self._release = weakref.finalize(self, _release, child, self.channel, self._watch, self._view)
        self._watch.start()
        self.channel.send(start)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def fileno(self) -> int:
        """Return a file that becomes readable when the child has ended."""
        assert self._child.stdout is not None, "it is a pipe"
        return self._child.stdout.fileno()

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
            code = kill_process(self._child)
        return self._watch.verdict or f"{describe_exit(code)}{self._view.read().called}"

    def close(self) -> None:
        """Terminate the child, kill it if it does not end, and free what was kept of it; may be called twice."""
        end_process(self._child)
        self._release()


def _environment() -> dict[str, str]:
    """Return the environment without the variables of Trencadís: the tables hold the values, and some are secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}


def _release(child: subprocess.Popen[bytes], channel: Channel, watch: StallWatch, view: ActivityView) -> None:
    """End the child and free its pipes and descriptors; also runs where ``close`` was not called."""
    watch.close()
    kill_process(child)
    close_pipes(child)
    channel.close()
    view.close()
