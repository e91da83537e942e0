"""Contract of the noun ``executor``: one process or many, who hosts the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from trencadis.interfaces.backend import AllocationPlan, Backend, BackendCapabilities, PendingStep
from trencadis.interfaces.sampling import Sampler
from trencadis.records import (
    Batch,
    Bucket,
    Int32Array,
    MemoryReport,
    ModelFacts,
    ModelSource,
    WarmUpReport,
)

__all__ = ["INTERFACE_VERSION", "STABILITY", "Executor"]

INTERFACE_VERSION = 1
STABILITY = "provisional"


class Executor(ABC):
    """Starts ranks, ships batches to each, gathers one output. Engine thread."""

    @abstractmethod
    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Make one backend per rank, each where it will run, and load the model into all.

        Args:
            make_backend: Called with the rank, 0 .. num_ranks - 1.
            make_sampler: The same, for the sampler of that rank.
            source: The model.
        """

    @property
    def num_ranks(self) -> int:
        """Ranks it hosts, at least 1: numbered from 0; known once started, and the same from then on."""
        return 1

    @property
    @abstractmethod
    def capabilities(self) -> BackendCapabilities:
        """The backends' capabilities; known once started."""

    @abstractmethod
    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return the report of the rank with the least free memory."""

    @abstractmethod
    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate on every rank, and prepare nothing yet."""

    @abstractmethod
    def prepare(self, bucket: Bucket) -> None:
        """Compile or capture one bucket on every rank; returns when done."""

    @abstractmethod
    def submit(self, batch: Batch) -> PendingStep:
        """Ship a batch to every rank without waiting for it.

        Batches run in the order in which they were submitted. What comes back carries the report of each rank's KV connector under
        that rank, not merged: the engine waits for all ranks to agree. A dead rank shows as ``StepFailedError`` from ``wait``.
        """

    @abstractmethod
    def close(self) -> None:
        """Close backends and end ranks; may be called twice."""

    def warm_up(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Prepare buckets on every rank before the first batch; returns when done. See ``Backend.warm_up``.

        What is not prepared on one rank counts as not prepared. By default each bucket is prepared, largest first.

        Args:
            buckets: All that the bucketing strategy lists.
            progress: Called with the number of buckets done and of all, after each.
        """
        for done, bucket in enumerate(sorted(buckets, reverse=True), start=1):
            self.prepare(bucket)
            if progress is not None:
                progress(done, len(buckets))
        return WarmUpReport(prepared=tuple(buckets))

    def metrics(self) -> str:
        """Return what the backends count, in Prometheus' text format; empty if nothing. See ``Backend.metrics``."""
        return ""

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy whole KV blocks on every rank, in order with batches."""
        raise NotImplementedError(f"{type(self).__name__} does not copy blocks")
