"""Contract of the noun ``backend``: runs batches on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from trencadis.interfaces.acceptance import AcceptanceRule
from trencadis.interfaces.kv_connector import KVWorkerSide
from trencadis.interfaces.sampling import Sampler
from trencadis.records import (
    Batch,
    Bucket,
    Int32Array,
    MemoryReport,
    ModelFacts,
    ModelSource,
    StepOutput,
    WarmUpReport,
)

__all__ = [
    "INTERFACE_VERSION",
    "STABILITY",
    "AllocationPlan",
    "Backend",
    "BackendCapabilities",
    "PendingStep",
]

INTERFACE_VERSION = 1
STABILITY = "provisional"


@attrs.frozen(kw_only=True)
class BackendCapabilities:
    """What a backend can do, known before a model is loaded.

    Attributes:
        layout: ``ragged``: one pass per step, nothing padded. ``padded``: prefill passes and one decode pass,
            each in a bucket. ``unified``: one pass per step, prefills and decodes in one row of tokens, in a
            ``UnifiedBucket``; takes a bucketing that provides ``bucketing.unified``. The engine splits plans accordingly.
        default_block_size: KV block size used if the config names none, tokens.
        max_prefill_batch_size: Most sequences in one padded prefill pass; 0 means no limit.
        contiguous: Decode passes read blocks by range (see ``BucketLimits.contiguous``).
        shares_blocks: Two sequences may have a block in common. Where not, the engine turns prefix caching off.
        copy_sizes: How many blocks ``copy_blocks`` copies at once, ascending; fewer are padded to the next, and the engine asks for no
            more. Empty: any number.
        merges_prefills: The prompts of a padded prefill pass, at most ``max_prefill_batch_size``, follow each other in one
            row: its shape is ``(1, all new tokens, all context blocks)``.
        swaps_blocks: It has ``swap_blocks``, so preempted sequences may wait in host memory.
        layerwise_kv: Each layer of a step waits for the layer-wise loads and saves of the KV connector before it is written to (see
            ``LayerGate``), and the pool that ``kv_cache`` shows can be read and written by layer, from any thread.
        provides: Names for capability negotiation, such as ``backend.tree_attention``.
        collectives: With which it computes among other ranks, best first: ``shared_memory``, ``gloo``, ``nccl``, ``hccl``. Empty: it
            is alone.
    """

    layout: str
    default_block_size: int
    max_prefill_batch_size: int = 0
    contiguous: bool = False
    shares_blocks: bool = True
    copy_sizes: tuple[int, ...] = ()
    merges_prefills: bool = False
    swaps_blocks: bool = False
    layerwise_kv: bool = False
    provides: frozenset[str] = frozenset()
    collectives: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class AllocationPlan:
    """How much state a backend is to hold.

    Attributes:
        num_blocks: KV blocks 0 .. num_blocks - 1; a backend adds padding blocks of its own. Where ranks have sequences of their own
            (``ParallelLayout.num_partitions``), of these, of the rows and of the host blocks rank r has the r-th of equal parts.
        block_size: Tokens per block.
        num_rows: Sequences at once (``max_num_seqs``).
        max_model_len: Tokens per sequence.
        max_num_batched_tokens: Tokens per step.
        max_draft_tokens: Drafts of a sequence in a step; 0 without speculation.
        acceptance: Which drafts stand; None without speculation.
        connector: Worker side of the KV connector; None without one.
        num_host_blocks: Blocks in host memory that ``swap_blocks`` copies to and from, 0 .. num_host_blocks - 1; pinned where the
            device copies from pinned memory faster. 0 unless the backend says ``swaps_blocks``.
        layer_wait_s: The longest that the layers of a step wait for layer-wise loads, all together, seconds.
    """

    num_blocks: int
    block_size: int
    num_rows: int
    max_model_len: int
    max_num_batched_tokens: int
    max_draft_tokens: int = 0
    acceptance: AcceptanceRule | None = None
    connector: KVWorkerSide | None = None
    num_host_blocks: int = 0
    layer_wait_s: float = 0.0


class PendingStep(Protocol):
    """A step that was submitted and may still run. Any one thread may wait for it.

    It may have an attribute ``is_done``, whether ``wait`` would return at once: then an executor in another process need not wait for it
    on a thread of its own.
    """

    def wait(self) -> StepOutput:
        """Block until the step is done and return its result.

        Raises:
            StepFailedError: The step raised; no token of it counts.
        """
        ...


class Backend(ABC):
    """A device with a model on it. All calls come from one thread, batches in order.

    Life: ``capabilities`` ▶ ``load`` ▶ ``memory`` ▶ ``allocate`` ▶ ``warm_up`` ▶ ``submit``* ▶ ``close``.
    """

    @property
    @abstractmethod
    def capabilities(self) -> BackendCapabilities:
        """Constant for the life of the object."""

    @abstractmethod
    def load(self, source: ModelSource, *, sampler: Sampler) -> ModelFacts:
        """Load the model's weights.

        Raises:
            ModelLoadError: The files are incomplete, or the model would not be computed correctly.
            OutOfMemoryError: No room for the weights.
        """

    @abstractmethod
    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Try the largest step and report memory; called once, before ``allocate``."""

    @abstractmethod
    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate the KV cache and the rows' state.

        Raises:
            OutOfMemoryError: No room.
        """

    @abstractmethod
    def prepare(self, bucket: Bucket) -> None:
        """Compile or capture one bucket; leaves no trace in KV cache or rows. A no-op where nothing is compiled."""

    @abstractmethod
    def submit(self, batch: Batch) -> PendingStep:
        """Run a batch; may return before it is done, and then runs it before any later batch.

        Prompts and drafts arrive as ``row_starts`` and ``drafts``; sampled tokens are kept on the device as the input of
        the row's next step, so the next batch may be submitted before this one's tokens are known to the engine.
        """

    @abstractmethod
    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy whole KV blocks on the device, after every batch submitted so far and before any later one.

        Every source is read before any target is written, so that blocks can change places.

        Args:
            sources: int32 ``[n]``.
            targets: int32 ``[n]``, none twice.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the device; the object is not used again. May be called twice."""

    def warm_up(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Prepare buckets before the first batch, and whatever else would be compiled while requests wait.

        Called once, after ``allocate``, on backends that are not ragged. By default each bucket is prepared, largest first:
        then the memory of the smaller ones is there. A backend that leaves some out says so in its log and in the report.

        Args:
            buckets: All that the bucketing strategy lists; may be empty.
            progress: Called with the number of buckets done and of all, after each, on the calling thread.
        """
        for done, bucket in enumerate(sorted(buckets, reverse=True), start=1):
            self.prepare(bucket)
            if progress is not None:
                progress(done, len(buckets))
        return WarmUpReport(prepared=tuple(buckets))

    def metrics(self) -> str:
        """Return what the backend counts, in Prometheus' text format; empty if nothing. May be called on any thread."""
        return ""
