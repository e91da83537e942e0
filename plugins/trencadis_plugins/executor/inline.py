"""One backend in this process, on one worker thread: ``submit`` returns at once, the engine plans the next step meanwhile.

engine thread   submit(n) ─▶ submit(n + 1) ─▶ wait(n) ...
                   │            │
worker thread      └▶ begin_step ▶ backend.submit ▶ end_step ▶ poll    one batch after the other

Where the backend computes in ``submit``, both threads want Python's lock when a batch is done: the worker prepares the next one, and
whatever that waits for, its tokens wait for; the engine has until the end of that batch. So the worker goes first, for as long as
preparing takes, about. A Llama of 110 million parameters waited 0.3 to 0.4 ms of each step of 13 otherwise, and 0.1 so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import attrs

from trencadis.errors import BackendError, StepFailedError
from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    Executor,
    HeadBatch,
    HeadGuesses,
    HeadNodes,
    PendingStep,
    Sampler,
    SupportsDeferredWarmUp,
    SupportsHead,
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
from trencadis_plugins.executor.ranks.host import RankHost, merged

__all__ = ["InlineExecutor"]

T = TypeVar("T")

_LONG_S: Final = 0.002
"""Shortest batch that is given a head start, which is to be little of it."""
_HEAD_START: Final = 0.02
"""Share of a batch's duration, for the next one; rows are prepared one by one, so it grows with them."""
_HEAD_START_S: Final = 0.00025, 0.001
"""At least and at most."""


class InlineExecutor(Executor):
    """Hosts one rank; every call of its backend, and of the KV connector's worker side, comes from one thread.

    A step that raises fails alone: the error comes from its ``wait`` as ``StepFailedError``, and later batches run.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trencadis-backend")
        self._rank: RankHost | None = None
        self._rest: Future[tuple[Bucket, ...]] | None = None
        self._unreported: list[ConnectorReport] = []
        self._newest: Future[tuple[PendingStep, ConnectorReport | None]] | None = None
        self._took_s = 0.0
        self._is_closed = False
        self._is_starting = False

    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Make backend and sampler on the worker thread, and load the model."""

        def run() -> ModelFacts:
            try:
                backend = make_backend(0)
                self._rank = RankHost(backend, make_sampler(0))
                return self._rank.load(source)
            finally:
                self._is_starting = False

        self._is_starting = True
        return self._call(run)

    @property
    def capabilities(self) -> BackendCapabilities:
        """The backend's."""
        return self._started().backend.capabilities

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return the backend's report."""
        backend = self._started().backend
        return self._call(
            lambda: backend.memory(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        )

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate, and show the KV cache to the connector's worker side."""
        rank = self._started()
        self._call(lambda: rank.allocate(plan))

    def prepare(self, bucket: Bucket) -> None:
        """Prepare a bucket; returns when done."""
        backend = self._started().backend
        self._call(lambda: backend.prepare(bucket))

    def warm_up(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Let the backend warm up; returns when done. ``progress`` is called on the worker thread."""
        backend = self._started().backend
        return self._call(lambda: backend.warm_up(buckets, progress=progress))

    def warm_up_rest(self, *, is_idle: bool) -> tuple[Bucket, ...]:
        """Let the backend go on with its warm-up, after every batch submitted so far."""
        rank = self._started()
        if not isinstance(rank.backend, SupportsDeferredWarmUp):
            return ()
        ready: tuple[Bucket, ...] = ()
        if self._rest is not None and (is_idle or self._rest.done()):
            rest, self._rest = self._rest, None
            ready = rest.result()
        if is_idle:
            return ready or self._call(lambda: rank.warm_up_rest(is_idle=True))
        if self._rest is None:
            self._rest = self._worker.submit(lambda: rank.warm_up_rest(is_idle=False))
        return ready

    def metrics(self) -> str:
        """Return what the backend counts."""
        return "" if self._rank is None else self._rank.backend.metrics()

    def submit(self, batch: Batch) -> PendingStep:
        """Hand a batch to the worker thread."""
        rank = self._started()
        self._newest = self._worker.submit(self._run, rank, batch)
        return _InlineStep(self._newest, type(rank.backend).__name__, self._unreported, self._let_next_start)

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Embed texts after every batch submitted so far."""
        rank = self._started()
        return self._call(lambda: rank.embed(token_ids))

    def draft(self, batch: HeadBatch) -> Int32Array:
        """Draft with the model's head, after every batch submitted so far.

        Raises:
            BackendError: The backend has none.
        """
        head = self._head()
        return self._call(lambda: head.draft(batch))

    def rank(self, nodes: HeadNodes) -> HeadGuesses:
        """Look beyond nodes of draft trees with the model's head, after every batch submitted so far.

        Raises:
            BackendError: The backend has none.
        """
        head = self._head()
        return self._call(lambda: head.rank(nodes))

    def _head(self) -> SupportsHead:
        backend = self._started().backend
        if not isinstance(backend, SupportsHead):
            raise BackendError(f"{type(backend).__name__} has no head that drafts.")
        return backend

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy blocks after every batch submitted so far."""
        backend = self._started().backend
        self._call(lambda: backend.copy_blocks(sources=sources, targets=targets))

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Hand copies to the worker thread; if they fail, so does the next batch."""
        rank = self._started()
        if not isinstance(rank.backend, SupportsSwapping):
            raise BackendError(f"{type(rank.backend).__name__} does not swap blocks.")
        self._worker.submit(lambda: rank.swap_blocks(outs=outs, ins=ins))

    def kv_layout(self) -> KVLayout:
        """Return the layout of the backend's cache."""
        return self._call(self._started().kv_layout)

    def close_connector(self) -> None:
        """Close the connector's worker side, after every batch submitted so far."""
        self._call(self._started().close_connector)

    def close(self) -> None:
        """Finish what was submitted, close connector and backend, end the thread.

        Does not wait for a start that was interrupted, which may take minutes: the thread closes what it has loaded.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._is_starting:
                self._worker.submit(lambda: None if self._rank is None else self._rank.close())
            elif self._rank is not None:
                self._worker.submit(self._rank.close).result()
        finally:
            self._worker.shutdown(wait=not self._is_starting)

    # ------------------------------------------------------------------------------------------------- innards

    def _started(self) -> RankHost:
        if self._rank is None or self._is_closed:
            raise BackendError("The executor inline was not started, or is closed.")
        return self._rank

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

    def _run(self, rank: RankHost, batch: Batch) -> tuple[PendingStep, ConnectorReport | None]:
        since_s = time.perf_counter()
        try:
            return rank.submit(batch)
        finally:
            self._took_s = time.perf_counter() - since_s


class _InlineStep:
    """A batch on its way through the worker thread.

    Args:
        future: Future of the submission.
        name: Name of the backend, for errors.
        unreported: Reports of steps that failed; what is reported once goes with the next step that does not.
        let_next_start: Called when it has run, if it was waited for.
    """

    def __init__(
        self,
        future: Future[tuple[PendingStep, ConnectorReport | None]],
        name: str,
        unreported: list[ConnectorReport],
        let_next_start: Callable[[], None],
    ) -> None:
        self._future = future
        self._name = name
        self._unreported = unreported
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
                self._unreported.append(report)
            output = pending.wait()
            if was_awaited:
                self._let_next_start()
        except StepFailedError:
            raise
        except Exception as error:
            raise StepFailedError(f"{self._name}: {type(error).__name__}: {error}") from error
        if report is None:
            return output
        reports = self._unreported.copy()
        self._unreported.clear()
        return attrs.evolve(output, connector_reports={0: merged(reports)})
