"""Ranks in processes of their own without sums between them, and backends that fail when a prompt begins with one token."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from trencadis.errors import CollectiveError, SamplingFailedError
from trencadis.interfaces import BackendCapabilities
from trencadis_plugins.executor.processes import ProcessesExecutor
from trencadis_plugins.executor.ranks.rank import Rank
from trencadis_testing.executor_fakes import TellingBackend
from trencadis_testing.fakes import FakeBackend

DEADLY = 90


@attrs.frozen
class Preloading:
    """A maker of backends that has something imported before ranks are forked."""

    make: Any
    preload: Any

    def __call__(self, rank: int) -> Any:
        """Make one."""
        return self.make(rank)


def import_fakes() -> None:
    """Import what the backends of these tests are."""
    importlib.import_module("support.strategies.failing_ranks")


def leave_a_thread() -> None:
    """Break the contract."""
    threading.Thread(target=signal.pause, daemon=True).start()


def fail() -> None:
    """Raise."""
    raise ImportError("no such library")


class WithoutSums(ProcessesExecutor):
    """Connects its ranks with the engine only: each computes everything, as fakes do. Importing torch would take their seconds.

    Args:
        preload: See :class:`Preloading`; None: ranks are not forked.

    Attributes:
        process_ids: Of all ranks that were started.
    """

    def __init__(self, *arguments: Any, preload: Any = import_fakes, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.process_ids: list[int] = []
        self.imports = preload

    def _start_ranks(self, make_backend) -> Iterable[Rank]:
        for rank in super()._start_ranks(Preloading(make_backend, self.imports)):
            self.process_ids.append(rank.pid)
            yield rank

    def _new_groups(self, capabilities: BackendCapabilities) -> None:
        """Make none."""


class OneSided(TellingBackend):
    """Fails a step on one rank only."""

    def submit(self, batch):
        if self._rank == 1 and any(start.token_ids[0] == DEADLY for start in batch.row_starts):
            raise RuntimeError("rank 1 alone")
        return super().submit(batch)


class CannotSample(TellingBackend):
    """Has no tokens for a step, on the rank that samples: the first one of these."""

    def submit(self, batch):
        step = super().submit(batch)
        if self._rank == 0 and any(start.token_ids[0] == DEADLY for start in batch.row_starts):
            raise SamplingFailedError("no tokens")
        return step


class WaitsInVain(TellingBackend):
    """Raises on rank 0, for which the other one has waited."""

    def submit(self, batch):
        if any(start.token_ids[0] == DEADLY for start in batch.row_starts):
            raise CollectiveError("rank 0 did not come") if self._rank else RuntimeError("rank 0 alone")
        return super().submit(batch)


class Hangs(TellingBackend):
    def submit(self, batch):
        if any(start.token_ids[0] == DEADLY for start in batch.row_starts):
            while True:
                signal.pause()
        return super().submit(batch)


class Dies(FakeBackend):
    """Ends its process when it is given a prompt that begins with the deadly token, as long as a file is there."""

    def __init__(self, mark: Path, *, once: bool) -> None:
        super().__init__(eos=-1, max_model_len=120)
        self._mark, self._once = mark, once

    def submit(self, batch):
        if any(start.token_ids[0] == DEADLY for start in batch.row_starts) and self._mark.exists():
            if self._once:
                self._mark.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        step = super().submit(batch)
        self.run_queued()
        return step


class SignalledIn(TellingBackend):
    """Sends its own process a signal in one call, on one rank.

    Args:
        rank: Its own.
        call: Name of the method.
        number: The signal.
        victim: The rank.
    """

    def __init__(self, rank: int, *, call: str, number: int, victim: int) -> None:
        self._signals = {call: number} if rank == victim else {}
        self._maybe("__init__")
        super().__init__(rank)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._maybe(name)
        return super().__getattribute__(name)

    def _maybe(self, name: str) -> None:
        if name in self._signals:
            os.kill(os.getpid(), self._signals[name])


@attrs.frozen
class MakesSignalled:
    """Makes such backends; can be pickled."""

    call: str
    number: int
    victim: int

    def __call__(self, rank: int) -> SignalledIn:
        """Make one."""
        return SignalledIn(rank, call=self.call, number=self.number, victim=self.victim)


@attrs.frozen
class MakesDyingAtLoad:
    """Makes backends; one that loads while a file is there takes it away and ends its process. Can be pickled."""

    mark: Path

    def __call__(self, rank: int) -> TellingBackend:
        """Make one."""
        if self.mark.exists():
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return TellingBackend(rank)
