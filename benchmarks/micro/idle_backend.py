"""A backend that computes nothing; in a module of its own, so that it can be sent to the process of a rank."""

from __future__ import annotations

from trencadis.interfaces import PendingStep
from trencadis.records import Batch
from trencadis_testing.fakes import FakeBackend

__all__ = ["Idle"]


class Idle(FakeBackend):
    """Runs its batches when they are submitted, as a backend on the CPU does."""

    def __init__(self) -> None:
        super().__init__(strict=False, eos=-1, max_model_len=8192)

    def submit(self, batch: Batch) -> PendingStep:
        step = super().submit(batch)
        self.run_queued()
        return step
