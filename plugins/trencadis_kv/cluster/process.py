"""One member of a cluster as a process: start, output, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from trencadis_kv.cluster.plan import Member

__all__ = ["SERVE", "MemberProcess"]

SERVE = (sys.executable, "-m", "trencadis", "serve")

_END_S = 30.0
_LINE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


class MemberProcess:
    """Runs ``trencadis serve``. Event loop only.

    Args:
        member: Member to run.
        announce: Called with each line that the process prints, prefixed with the member's name.
        command: Command to run, followed by the member's flags; ``trencadis serve`` by default.

    Attributes:
        member: Member that is run.
    """

    def __init__(self, member: Member, announce: Callable[[str], None], *, command: Sequence[str] = SERVE) -> None:
        self.member = member
        self._command = tuple(command)
        self._announce = announce
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process; does not wait until it serves."""
        self._ready.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *self.member.flags,
            env={**os.environ, **self.member.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            preexec_fn=_ends_with_parent(),
            start_new_session=True,  # Ctrl-C reaches only the cluster, which ends its members in order
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def ready(self) -> bool:
        """Wait until it serves; False if the process ended first."""
        assert self._reader is not None, "it was started"
        waiting = asyncio.create_task(self._ready.wait())
        await asyncio.wait({waiting, self._reader}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self._ready.is_set()

    async def ended(self) -> int:
        """Wait for the end; returns the exit code, negative for a signal."""
        assert self._process is not None, "it was started"
        code = await self._process.wait()
        if self._reader is not None:
            await self._reader
        return code

    async def end(self) -> None:
        """Send SIGTERM, and SIGKILL if it does not end."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.ended(), _END_S)
        except TimeoutError:
            self.kill()
            await self.ended()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "it is a pipe"
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            self._announce(f"[{self.member.name}] {text}")
            if (
                "Ready: " in text
            ):  # not necessarily at the start: an unfinished line of another process, such as Ray's, may precede it
                self._ready.set()


def _ends_with_parent() -> Callable[[], None] | None:
    """Return a function to call in the child, so that it gets SIGTERM when this process dies; None if not supported.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    call = ctypes.CDLL(None).prctl
    return lambda: call(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
