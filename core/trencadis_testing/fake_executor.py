"""An executor in this thread, with the KV connector's calls around every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    Executor,
    KVWorkerSide,
    PendingStep,
    Sampler,
)
from trencadis.records import (
    Batch,
    Bucket,
    Float32Array,
    Int32Array,
    KVLayout,
    MemoryReport,
    ModelFacts,
    ModelSource,
    StepOutput,
    WarmUpReport,
)
from trencadis_testing.optional_calls import full_backend

__all__ = ["FakeExecutor"]


class FakeExecutor(Executor):
    """One backend in this thread; what it is told to do, it does at once.

    Args:
        backend: Used instead of what ``make_backend`` makes, if given.
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self._given = backend
        self._connector: KVWorkerSide | None = None
        self._ins = BlockCopies.none()

    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Make the backend and load the model."""
        self.backend = full_backend(self._given or make_backend(0))
        return self.backend.load(source, sampler=make_sampler(0))

    @property
    def capabilities(self) -> BackendCapabilities:
        """The backend's."""
        return self.backend.capabilities

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """The backend's."""
        return self.backend.memory(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate, and show the cache to the connector's worker side."""
        self._connector = plan.connector
        self.backend.allocate(plan)
        if self._connector is not None:
            self._connector.register(self.backend.kv_cache())

    def prepare(self, bucket: Bucket) -> None:
        """Prepare at once."""
        self.backend.prepare(bucket)

    def warm_up(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Warm up at once."""
        return self.backend.warm_up(buckets, progress=progress)

    def warm_up_rest(self, *, is_idle: bool) -> tuple[Bucket, ...]:
        """Let the backend go on."""
        return self.backend.warm_up_rest(is_idle=is_idle)

    def metrics(self) -> str:
        """The backend's."""
        return self.backend.metrics()

    def submit(self, batch: Batch) -> PendingStep:
        """Pass the batch on, between the two calls of the connector."""
        connector = self._connector
        if connector is None:
            return self.backend.submit(batch)
        ins, self._ins = self._ins, BlockCopies.none()
        if batch.passes and not len(ins) and self.capabilities.layerwise_kv:
            connector.expect_layers()
        connector.begin_step(batch.connector_message)
        output, failure = None, None
        try:
            if len(ins):
                self.backend.swap_blocks(outs=BlockCopies.none(), ins=ins)
            output = self.backend.submit(batch).wait()
        except Exception as error:
            failure = error
        connector.end_step()
        if output is not None:
            output = attrs.evolve(output, connector_reports={0: connector.poll()})
        return _ConnectedStep(output, failure)

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Embed at once."""
        return self.backend.embed(token_ids)

    def kv_layout(self) -> KVLayout:
        """The backend's cache's."""
        return self.backend.kv_cache().layout

    def close_connector(self) -> None:
        """Close it at once."""
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy at once."""
        self.backend.copy_blocks(sources=sources, targets=targets)

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy at once; what comes in beside a connector, with the next batch."""
        if self._connector is not None:
            self._ins, ins = ins, BlockCopies.none()
        self.backend.swap_blocks(outs=outs, ins=ins)

    def close(self) -> None:
        """Close connector and backend, if there are any."""
        self.close_connector()
        if hasattr(self, "backend"):
            self.backend.close()


class _ConnectedStep:
    """A finished step: its output, or the error that it raises when it is waited for."""

    def __init__(self, output: StepOutput | None, error: Exception | None) -> None:
        self._output = output
        self._error = error

    def wait(self) -> StepOutput:
        if self._output is None:
            assert self._error is not None, "a step has an output or an error"
            raise self._error
        return self._output
