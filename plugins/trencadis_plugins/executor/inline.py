"""One backend in this process, on one worker thread: ``submit`` returns at once, the engine plans the next step meanwhile.

engine thread   submit(n) ─▶ submit(n + 1) ─▶ wait(n) ...
                   │            │
worker thread      └▶ begin_step ▶ backend.submit ▶ end_step ▶ poll    one batch after the other

Where the backend computes in ``submit``, both threads want Python's lock when a batch is done: the worker prepares the next one, and
whatever that waits for, its tokens wait for; the engine has until the end of that batch. So the worker goes first, for as long as
preparing takes, about. A Llama of 110 million parameters waited 0.3 to 0.4 ms of each step of 13 otherwise, and 0.1 so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import attrs

from trencadis.errors import BackendError, StepFailedError
from trencadis.faults import FaultLog, as_words
from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    Executor,
    KVPool,
    KVWorkerSide,
    PendingStep,
    Sampler,
    SupportsDeferredWarmUp,
    SupportsEmbedding,
    SupportsKVPool,
    SupportsSwapping,
)
from trencadis.records import (
    Batch,
    Bucket,
    ConnectorReport,
    Float32Array,
    Int32Array,
    KVLayout,
    MemoryReport,
    ModelFacts,
    ModelSource,
    StepOutput,
    WarmUpReport,
)

__all__ = ["InlineExecutor"]

logger = logging.getLogger("trencadis.executor")

T = TypeVar("T")

_LONG_S: Final = 0.002
"""Of a batch: no shorter one is given a head start, which is to be little of it."""
_HEAD_START: Final = 0.02
"""Of a batch's duration, for the next one; rows are prepared one by one, so it grows with them."""
_HEAD_START_S: Final = 0.00025, 0.001
"""At least and at most."""


class InlineExecutor(Executor):
    """Hosts one backend; every call of it, and of the KV connector's worker side, comes from one thread.

    A step that raises fails alone: the error comes from its ``wait`` as ``StepFailedError``, and later batches run. A connector
    that raises costs a warning; what it was to load is recomputed once the load times out.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trencadis-backend")
        self._backend: Backend | None = None
        self._connector: KVWorkerSide | None = None
        self._swaps: list[Future[None]] = []
        self._ins = BlockCopies.none()
        self._rest: Future[tuple[Bucket, ...]] | None = None
        self._untold: list[ConnectorReport] = []
        self._newest: Future[tuple[PendingStep, ConnectorReport | None]] | None = None
        self._took_s = 0.0
        self._is_closed = False
        self._faults = FaultLog(logger)

    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Make backend and sampler on the worker thread, and load the model."""

        def run() -> ModelFacts:
            self._backend = make_backend(0)
            return self._backend.load(source, sampler=make_sampler(0))

        return self._call(run)

    @property
    def capabilities(self) -> BackendCapabilities:
        """The backend's."""
        return self._started().capabilities

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return the backend's report."""
        backend = self._started()
        return self._call(
            lambda: backend.memory(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        )

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate, and show the KV cache to the connector's worker side."""
        backend = self._started()

        def run() -> None:
            backend.allocate(plan)
            if plan.connector is not None:
                plan.connector.register(_kv_cache(backend))
                self._connector = plan.connector

        self._call(run)

    def prepare(self, bucket: Bucket) -> None:
        """Prepare a bucket; returns when done."""
        backend = self._started()
        self._call(lambda: backend.prepare(bucket))

    def warm_up(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Let the backend warm up; returns when done. ``progress`` is called on the worker thread."""
        backend = self._started()
        return self._call(lambda: backend.warm_up(buckets, progress=progress))

    def warm_up_rest(self, *, is_idle: bool) -> tuple[Bucket, ...]:
        """Let the backend go on with its warm-up, after every batch submitted so far."""
        backend = self._started()
        if not isinstance(backend, SupportsDeferredWarmUp):
            return ()
        ready: tuple[Bucket, ...] = ()
        if self._rest is not None and (is_idle or self._rest.done()):
            rest, self._rest = self._rest, None
            ready = rest.result()
        if is_idle:
            return ready or self._call(lambda: backend.warm_up_rest(is_idle=True))
        if self._rest is None:
            self._rest = self._worker.submit(lambda: backend.warm_up_rest(is_idle=False))
        return ready

    def metrics(self) -> str:
        """Return what the backend counts."""
        return "" if self._backend is None else self._backend.metrics()

    def submit(self, batch: Batch) -> PendingStep:
        """Hand a batch to the worker thread."""
        backend = self._started()
        swaps, self._swaps = self._swaps, []
        ins, self._ins = self._ins, BlockCopies.none()
        self._newest = self._worker.submit(self._run, backend, batch, swaps, ins)
        return _InlineStep(self._newest, type(backend).__name__, self._untold, self._let_next_start)

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Embed texts after every batch submitted so far."""
        backend = self._started()
        if not isinstance(backend, SupportsEmbedding):
            raise BackendError(f"{type(backend).__name__} does not embed.")
        return self._call(lambda: backend.embed(token_ids))

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy blocks after every batch submitted so far."""
        backend = self._started()
        self._call(lambda: backend.copy_blocks(sources=sources, targets=targets))

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Hand copies to the worker thread; if they fail, so does the next batch."""
        backend = self._started()
        if not isinstance(backend, SupportsSwapping):
            raise BackendError(f"{type(backend).__name__} does not swap blocks.")
        if self._connector is not None:
            self._ins, ins = ins, BlockCopies.none()
        self._swaps.append(self._worker.submit(lambda: backend.swap_blocks(outs=outs, ins=ins)))

    def kv_layout(self) -> KVLayout:
        """Return the layout of the backend's cache."""
        return self._call(lambda: _kv_cache(self._started()).layout)

    def close_connector(self) -> None:
        """Close the connector's worker side, after every batch submitted so far."""
        self._call(self._close_connector)

    def close(self) -> None:
        """Finish what was submitted, close connector and backend, end the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._worker.submit(self._close).result()
        finally:
            self._worker.shutdown()

    # ------------------------------------------------------------------------------------------------- innards

    def _started(self) -> Backend:
        if self._backend is None or self._is_closed:
            raise BackendError("The executor inline was not started, or is closed.")
        return self._backend

    def _call(self, run: Callable[[], T]) -> T:
        if self._is_closed:
            raise BackendError("The executor inline is closed.")
        return self._worker.submit(run).result()

    def _let_next_start(self) -> None:
        """Leave Python's lock to the worker while it prepares the next batch, if there is one that it has not run yet."""
        took_s = self._took_s
        if took_s >= _LONG_S and self._newest is not None and not self._newest.done():
            least_s, most_s = _HEAD_START_S
            time.sleep(min(most_s, max(least_s, _HEAD_START * took_s)))

    def _run(
        self, backend: Backend, batch: Batch, swaps: Sequence[Future[None]], ins: BlockCopies
    ) -> tuple[PendingStep, ConnectorReport | None]:
        since_s = time.perf_counter()
        try:
            return self._run_framed(backend, batch, swaps, ins)
        finally:
            self._took_s = time.perf_counter() - since_s

    def _run_framed(
        self, backend: Backend, batch: Batch, swaps: Sequence[Future[None]], ins: BlockCopies
    ) -> tuple[PendingStep, ConnectorReport | None]:
        connector = self._connector
        if connector is None:
            _all_done(swaps)
            return backend.submit(batch), None
        # Blocks that come in are written to before any layer is waited for; a step without passes waits for none.
        if batch.passes and not len(ins) and backend.capabilities.layerwise_kv:
            self._contained(connector.expect_layers, None)
        self._contained(lambda: connector.begin_step(batch.connector_message), None)
        try:
            _all_done(swaps)
            if len(ins) and isinstance(backend, SupportsSwapping):
                backend.swap_blocks(outs=BlockCopies.none(), ins=ins)
            pending = backend.submit(batch)
        finally:
            self._contained(connector.end_step, None)
        return pending, self._contained(connector.poll, None)

    def _contained(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what a call of the connector returns; its exceptions end here."""
        try:
            return call()
        except Exception as error:
            said = f"The KV connector's worker side raised {as_words(error)}; the step goes on without it."
            self._faults.say("worker side", said, error=error)
            return otherwise

    def _close(self) -> None:
        self._close_connector()
        if self._backend is not None:
            self._backend.close()

    def _close_connector(self) -> None:
        connector, self._connector = self._connector, None
        if connector is not None:
            self._contained(connector.close, None)


def _merged(reports: Sequence[ConnectorReport]) -> ConnectorReport:
    """Return one report that says what all do. Pure."""
    return ConnectorReport(
        loaded=tuple([transfer_id for report in reports for transfer_id in report.loaded]),
        failed=tuple([failed for report in reports for failed in report.failed]),
        released=tuple([transfer_id for report in reports for transfer_id in report.released]),
    )


def _kv_cache(backend: Backend) -> KVPool:
    if isinstance(backend, SupportsKVPool):
        return backend.kv_cache()
    raise BackendError(
        f"{type(backend).__name__} does not offer its KV cache.",
        hint='Set kv_connector.name to "none", or another backend.',
    )


def _all_done(swaps: Sequence[Future[None]]) -> None:
    """Raise what a copy raised; they ran before on the same thread."""
    for swap in swaps:
        swap.result()


class _InlineStep:
    """A batch on its way through the worker thread.

    Args:
        future: Of the submission.
        name: Of the backend, for errors.
        untold: Reports of steps that failed; what is reported once goes with the next step that does not.
        let_next_start: Called when it has run, if it was waited for.
    """

    def __init__(
        self,
        future: Future[tuple[PendingStep, ConnectorReport | None]],
        name: str,
        untold: list[ConnectorReport],
        let_next_start: Callable[[], None],
    ) -> None:
        self._future = future
        self._name = name
        self._untold = untold
        self._let_next_start = let_next_start

    def wait(self) -> StepOutput:
        """Block until the step is done.

        Raises:
            StepFailedError: It raised; the cause is chained.
        """
        was_awaited = (
            not self._future.done()
        )  # else the engine is the slower one of both, and the worker is ahead already
        try:
            pending, report = self._future.result()
            if report is not None:
                self._untold.append(report)
            output = pending.wait()
            if was_awaited:
                self._let_next_start()
        except StepFailedError:
            raise
        except Exception as error:
            raise StepFailedError(f"{self._name}: {type(error).__name__}: {error}") from error
        if report is None:
            return output
        reports = self._untold.copy()
        self._untold.clear()
        return attrs.evolve(output, connector_reports={0: _merged(reports)})
