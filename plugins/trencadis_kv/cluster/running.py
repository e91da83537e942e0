"""Runs a cluster: a prefill engine that dies is restarted; the end of a serving engine is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from trencadis.errors import ConfigError
from trencadis_kv.cluster.discovery import knows_prefill
from trencadis_kv.cluster.forwarder import Forwarder
from trencadis_kv.cluster.plan import HOST, Member
from trencadis_kv.cluster.process import SERVE, MemberProcess

__all__ = ["Cluster"]

T = TypeVar("T")

_RESTART_S: Final = 1.0
_MEET_S: Final = 10.0
_MAX_EARLY_ENDS: Final = 5
"""Consecutive ends before readiness after which a member is not started again."""


class Cluster:
    """Runs members until :meth:`stop`. Event loop only.

    Args:
        members: Members in start order, as returned by :func:`plan_cluster`.
        port: Port that clients connect to.
        announce: Called with each line to print.
        command: Command that each member runs, as for :class:`MemberProcess`.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        port: int,
        announce: Callable[[str], None],
        command: Sequence[str] = SERVE,
    ) -> None:
        self._port = port
        self._announce = announce
        self._processes = [MemberProcess(member, announce, command=command) for member in members]
        self._stop = asyncio.Event()
        self._num_stops = 0

    def stop(self) -> None:
        """Shut down in order; a second call kills all members."""
        self._num_stops += 1
        self._stop.set()
        if self._num_stops > 1:
            for process in self._processes:
                process.kill()

    async def run(self) -> int:
        """Run; returns 0 after :meth:`stop`, 1 if no serving engine is left or a member could not be started.

        Raises:
            ConfigError: The port is in use.
        """
        doors = [process.member.port for process in self._processes if process.member.role != "prefill"]
        forwarder = Forwarder(HOST, doors)
        if len(doors) > 1:
            await self._listen(forwarder)
        try:
            for process in self._processes:
                await process.start()
            if not await self._all_ready():
                return 0 if self._stop.is_set() else 1
            self._greet()
            return await self._watch()
        finally:
            self._stop.set()
            await forwarder.close()
            await asyncio.gather(*[process.end() for process in self._processes if process.pid])

    async def _listen(self, forwarder: Forwarder) -> None:
        try:
            await forwarder.start(self._port)
        except OSError as error:
            raise ConfigError(
                f"trencadis cluster: cannot listen on {HOST}, port {self._port}: {error.strerror or error}.",
                hint="Choose another --port.",
            ) from error

    async def _all_ready(self) -> bool:
        for process in self._processes:
            if not await self._unless_stopped(process.ready()):
                if not self._stop.is_set():
                    self._announce(f"{process.member.name} ended before it was ready; the cluster ends.")
                return False
        await self._meet()
        return not self._stop.is_set()

    async def _meet(self) -> None:
        """Wait until every serving engine has a prefill engine, for the first prompt to go there."""
        members = [process.member for process in self._processes if process.member.role == "decode"]
        meetings = [knows_prefill(HOST, member.port, timeout_s=_MEET_S) for member in members]
        know = await self._unless_stopped(asyncio.gather(*meetings)) or ()
        for member, knows in zip(members, know, strict=False):  # `know` is empty if the cluster was stopped
            if not knows:
                self._announce(
                    f"{member.name} has found no engine that computes prompts within {_MEET_S:g} s; "
                    "until it finds one it computes them itself."
                )

    def _greet(self) -> None:
        for process in self._processes:
            member = process.member
            self._announce(f"{member.name}: pid {process.pid}, http://{HOST}:{member.port}/v1")
        self._announce(f"Cluster ready: http://{HOST}:{self._port}/v1")

    async def _watch(self) -> int:
        doors = [self._serve_door(process) for process in self._processes if process.member.role != "prefill"]
        others = [self._keep_up(process) for process in self._processes if process.member.role == "prefill"]
        tasks = [asyncio.ensure_future(one) for one in others]
        try:
            await self._unless_stopped(asyncio.gather(*doors))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._stop.is_set():
            return 0
        self._announce("Nobody is left who serves clients; the cluster ends.")
        return 1

    async def _serve_door(self, process: MemberProcess) -> None:
        code = await process.ended()
        if not self._stop.is_set():
            self._announce(f"{process.member.name} has ended ({_words(code)}); clients go to the others.")

    async def _keep_up(self, process: MemberProcess) -> None:
        num_early = 0
        while num_early < _MAX_EARLY_ENDS:
            code = await process.ended()
            if self._stop.is_set():
                return
            self._announce(f"{process.member.name} has ended ({_words(code)}); it is started again.")
            await asyncio.sleep(_RESTART_S)
            await process.start()
            num_early = 0 if await process.ready() else num_early + 1
            if not num_early:
                self._announce(f"{process.member.name}: pid {process.pid}, serves again.")
        self._announce(f"{process.member.name} cannot be started; prompts are computed where they come.")

    async def _unless_stopped(self, what: Awaitable[T]) -> T | None:
        """Return a result, or None if the cluster is stopped first."""
        task = asyncio.ensure_future(what)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return task.result()


def _words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
