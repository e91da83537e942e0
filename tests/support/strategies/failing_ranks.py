"""Ranks in processes of their own without sums between them, and backends that fail when a prompt begins with one token."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from trencadis.errors import CollectiveError
from trencadis.interfaces import BackendCapabilities
from trencadis_plugins.executor.processes import ProcessesExecutor
from trencadis_testing.executor_fakes import TellingBackend
from trencadis_testing.fakes import FakeBackend

DEADLY = 90


class WithoutSums(ProcessesExecutor):
    """Connects its ranks with the engine only: each computes everything, as fakes do. Importing torch would take their seconds."""

    def _new_groups(self, capabilities: BackendCapabilities) -> None:
        """Make none."""


class OneSided(TellingBackend):
    """Fails a step on one rank only."""

    def submit(self, batch):
        if self._rank == 1 and any(start.token_ids[0] == DEADLY for start in batch.row_starts):
            raise RuntimeError("rank 1 alone")
        return super().submit(batch)


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
