"""One rank: a backend, its sampler and the worker side of the KV connector, called in order on one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from trencadis.errors import BackendError
from trencadis.faults import FaultLog, as_words
from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BlockCopies,
    KVPool,
    KVWorkerSide,
    PendingStep,
    Sampler,
    SupportsDeferredWarmUp,
    SupportsEmbedding,
    SupportsKVPool,
    SupportsRemoteScheduler,
    SupportsSwapping,
)
from trencadis.records import (
    Batch,
    Bucket,
    ConnectorReport,
    Float32Array,
    Int32Array,
    KVLayout,
    ModelFacts,
    ModelSource,
)

__all__ = ["RankHost", "merged"]

logger = logging.getLogger("trencadis.executor")

T = TypeVar("T")


class RankHost:
    """Owns one backend and calls it; every method is called on the same thread, in the order of the executor's calls.

    A connector that raises costs a warning; what it was to load is recomputed once the load times out. A copy of blocks that fails
    fails the next batch.

    Args:
        backend: Backend of this rank; not loaded.
        sampler: Sampler of this rank.
    """

    def __init__(self, backend: Backend, sampler: Sampler) -> None:
        self.backend = backend
        self._sampler = sampler
        self._connector: KVWorkerSide | None = None
        self._swap_error: Exception | None = None
        self._ins = BlockCopies.none()
        self._faults = FaultLog(logger)

    def load(self, source: ModelSource) -> ModelFacts:
        """Load the model."""
        return self.backend.load(source, sampler=self._sampler)

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate, and show the KV cache to the connector's worker side."""
        self.backend.allocate(plan)
        if plan.connector is not None:
            plan.connector.register(self._kv_cache())
            self._connector = plan.connector

    def connect(self, layouts: Sequence[KVLayout], *, rank: int) -> None:
        """Tell the connector's worker side what every rank holds, if its scheduler side is in another process."""
        if isinstance(self._connector, SupportsRemoteScheduler):
            self._connector.on_ranks(layouts, rank=rank)

    def warm_up_rest(self, *, is_idle: bool) -> tuple[Bucket, ...]:
        """Let the backend go on with its warm-up; see ``SupportsDeferredWarmUp``."""
        if not isinstance(self.backend, SupportsDeferredWarmUp):
            return ()
        return self.backend.warm_up_rest(is_idle=is_idle)

    def submit(self, batch: Batch) -> tuple[PendingStep, ConnectorReport | None]:
        """Run a batch between the calls of the connector's worker side; the report is None without one."""
        connector, ins, self._ins = self._connector, self._ins, BlockCopies.none()
        if connector is None:
            self._raise_swap_error()
            return self.backend.submit(batch), None
        # Blocks that come in are written to before any layer is waited for; a step without passes waits for none.
        if batch.passes and not len(ins) and self.backend.capabilities.layerwise_kv:
            self._contained(connector.expect_layers, None)
        self._contained(lambda: connector.begin_step(batch.connector_message), None)
        try:
            self._raise_swap_error()
            if len(ins) and isinstance(self.backend, SupportsSwapping):
                self.backend.swap_blocks(outs=BlockCopies.none(), ins=ins)
            pending = self.backend.submit(batch)
        finally:
            self._contained(connector.end_step, None)
        return pending, self._contained(connector.poll, None)

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Embed texts.

        Raises:
            BackendError: The backend does not embed.
        """
        if not isinstance(self.backend, SupportsEmbedding):
            raise BackendError(f"{type(self.backend).__name__} does not embed.")
        return self.backend.embed(token_ids)

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy blocks to host memory now, and back now or, beside a connector, in the next batch; what fails fails that batch."""
        if self._connector is not None:
            self._ins, ins = ins, BlockCopies.none()
        try:
            if not isinstance(self.backend, SupportsSwapping):
                raise BackendError(f"{type(self.backend).__name__} does not swap blocks.")
            self.backend.swap_blocks(outs=outs, ins=ins)
        except Exception as error:
            self._swap_error = self._swap_error or error

    def kv_layout(self) -> KVLayout:
        """Return the layout of the backend's cache."""
        return self._kv_cache().layout

    def close_connector(self) -> None:
        """Close the connector's worker side; may be called twice."""
        connector, self._connector = self._connector, None
        if connector is not None:
            self._contained(connector.close, None)

    def close(self) -> None:
        """Close connector and backend."""
        self.close_connector()
        self.backend.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _kv_cache(self) -> KVPool:
        if isinstance(self.backend, SupportsKVPool):
            return self.backend.kv_cache()
        raise BackendError(
            f"{type(self.backend).__name__} does not offer its KV cache.",
            hint='Set kv_connector.name to "none", or another backend.',
        )

    def _raise_swap_error(self) -> None:
        error, self._swap_error = self._swap_error, None
        if error is not None:
            raise error

    def _contained(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what a call of the connector returns; its exceptions end here."""
        try:
            return call()
        except Exception as error:
            said = f"The KV connector's worker side raised {as_words(error)}; the step goes on without it."
            self._faults.say("worker side", said, error=error)
            return otherwise


def merged(reports: Sequence[ConnectorReport]) -> ConnectorReport:
    """Return one report that says what all do. Pure."""
    return ConnectorReport(
        loaded=tuple([transfer_id for report in reports for transfer_id in report.loaded]),
        failed=tuple([failed for report in reports for failed in report.failed]),
        released=tuple([transfer_id for report in reports for transfer_id in report.released]),
        messages=tuple([message for report in reports for message in report.messages]),
    )
