"""Plan and passes in, batch out: the deltas that bring the device's rows up to date."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from trencadis.engine.guard import Guarded
from trencadis.engine.sequences import SequenceTable
from trencadis.engine.state import EngineState
from trencadis.engine.step import PassCounts
from trencadis.errors import UnpreparedShapeError
from trencadis.interfaces import BackendCapabilities, BucketingStrategy
from trencadis.records import (
    Batch,
    Bucket,
    BucketLimits,
    Int32Array,
    Pass,
    Phase,
    Plan,
    Shape,
    UnifiedShape,
    WarmUp,
)

__all__ = ["BatchBuilder", "PassPlanner", "unified_shape"]


class BatchBuilder:
    """Builds batches for one engine.

    Args:
        state: The engine's state; its log of row starts and table writes is drained.
        passes: Splits plans.
        warm_up: Buckets that were prepared before the first request; None: none.

    Attributes:
        passes: The argument; its ``counts`` are those of the last batch.
        warm_up: The argument.
    """

    def __init__(self, state: EngineState, passes: PassPlanner, warm_up: WarmUp | None = None) -> None:
        self._state = state
        self.warm_up = warm_up or WarmUp()
        self.passes = passes

    def build(self, plan: Plan) -> Batch:
        """Return the batch of a plan.

        Raises:
            StepFailedError: The bucketing strategy failed and there is no fallback.
        """
        state = self._state
        passes = self.passes.passes(plan, state.rows.block_tables)
        row_starts, state.row_starts = tuple(state.row_starts), []
        return Batch(
            step=plan.step,
            num_sequences=len(plan.slots),
            row_starts=row_starts,
            table_writes=state.rows.take_writes(),
            passes=passes,
            # The plan is committed by its own numbers, whatever a backend writes to its batch.
            drafts=None if plan.drafts is None else plan.drafts.copy(),
        )


logger = logging.getLogger("trencadis.engine")

_sum = np.add.reduce


class PassPlanner:
    """Splits plans for one backend.

    A ragged or unified backend gets one pass. A padded one gets prefill passes of at most ``max_prefill_batch_size`` sequences,
    side by side or merged into a row, then one decode pass. A prefill pass of several sequences stays within the token budget
    with its padding: that is what memory was measured for.
    Source: the vLLM Gaudi plugin, prefills first, then one decode batch; in its unified form one batch of both.

    Args:
        bucketing: The guarded strategy.
        capabilities: The backend's.
        table: The engine's sequences, read for sizes only.
        limits: Sizes of the engine, or of each of its parts; a prefill pass of several sequences has at most ``max_num_batched_tokens``
            positions, padding included.
        refuse_unprepared: Refuse a pass whose bucket is not prepared, once any is.

    Attributes:
        counts: Counts of the plan that was split last.
        ready: Buckets that the device has prepared, at the start or when a pass first needed one.
        substitute: Returns the bucket in which a pass runs, by its shape and its own bucket; None: in its own.
    """

    def __init__(
        self,
        bucketing: Guarded[BucketingStrategy],
        *,
        capabilities: BackendCapabilities,
        table: SequenceTable,
        limits: BucketLimits,
        refuse_unprepared: bool = False,
    ) -> None:
        self._bucketing = bucketing
        self._ragged = capabilities.layout == "ragged"
        self._unified = capabilities.layout == "unified"
        self._contiguous = capabilities.contiguous
        self._counts_blocks = not (self._unified or self._contiguous)  # of decodes, by their lengths alone
        self._max_prefills = self._max_in_group = capabilities.max_prefill_batch_size or 1 << 30
        self._merges = capabilities.merges_prefills
        self._table = table
        self._block_size = limits.block_size
        self._max_positions = limits.max_num_batched_tokens
        self._refuse_unprepared = refuse_unprepared
        self.ready: set[Bucket] = set()
        self._used: set[Bucket] = set()
        self._listed: frozenset[Bucket] = frozenset()
        self._covering: tuple[Bucket, ...] = ()
        self.substitute: Callable[[Shape, Bucket], Bucket] | None = None
        self.counts = PassCounts()

    def prepared(self, buckets: tuple[Bucket, ...]) -> None:
        """Note which buckets the device has prepared; any other is counted and warned about once."""
        self.ready.update(buckets)
        self._used.update(buckets)

    def start_again(self, prepared: tuple[Bucket, ...]) -> None:
        """Note that the device was started again, and has these buckets prepared, whatever it had before."""
        self.ready.clear()
        self._used.clear()
        self.prepared(prepared)

    def cover(self, table: tuple[Bucket, ...], covering: tuple[Bucket, ...]) -> None:
        """Let shapes for which the strategy leaves its table run in one of ``covering`` that covers them."""
        self._listed, self._covering = frozenset(table), covering

    def passes(self, plan: Plan, block_tables: Int32Array) -> tuple[Pass, ...]:
        """Return the passes of a plan, in order.

        Args:
            plan: The plan.
            block_tables: Host block tables by row, for layouts that address blocks by range.

        Raises:
            StepFailedError: The bucketing strategy failed and there is no fallback.
            UnpreparedShapeError: A pass fits no prepared bucket, and such passes are refused.
        """
        self.counts = PassCounts()
        num_sequences = len(plan.slots)
        if not num_sequences:
            return ()
        is_single = plan.num_tokens == num_sequences  # one token each
        if self._ragged or self._unified or is_single:
            everything = np.arange(num_sequences, dtype=np.int32)
            is_decode = is_single or bool((plan.num_scheduled == 1 + plan.num_to_verify).all())
            return (self._pass(plan, everything, Phase.DECODE if is_decode else Phase.PREFILL, block_tables),)
        is_prefill = plan.num_scheduled > 1 + plan.num_to_verify
        passes = [
            self._pass(plan, group, Phase.PREFILL, block_tables)
            for group in self._group(plan, np.flatnonzero(is_prefill).astype(np.int32))
        ]
        decodes = np.flatnonzero(~is_prefill).astype(np.int32)
        if decodes.size:
            passes.append(self._pass(plan, decodes, Phase.DECODE, block_tables))
        return tuple(passes)

    def padded_tokens(self, num_sequences: int, query_len: int) -> int:
        """Return the token positions of a decode pass over so many sequences with so many tokens each."""
        if self._ragged or self._unified:
            return num_sequences * query_len
        return self._bucketing.ask.bucket_for(Shape(num_sequences, query_len, num_sequences, Phase.DECODE)).num_tokens

    def _group(self, plan: Plan, prefills: Int32Array) -> list[Int32Array]:
        """Cut prefills, longest first, into groups whose bucket stays within the token budget."""
        order = prefills[np.argsort(-plan.num_scheduled[prefills], kind="stable")]
        groups: list[list[int]] = []
        for index in order.tolist():
            if groups and len(groups[-1]) < self._max_in_group and self._fits(plan, [*groups[-1], index]):
                groups[-1].append(index)
            else:
                groups.append([index])
        return [np.array(sorted(group), np.int32) for group in groups]

    def _fits(self, plan: Plan, group: list[int]) -> bool:
        """Whether sequences can be one prefill pass: as they are, and padded to their bucket."""
        indices = np.array(group)
        shape = self._group_shape(plan.starts[indices], plan.num_scheduled[indices], plan.rows[indices])
        if shape.num_tokens > self._max_positions or shape.batch_size > self._max_prefills:
            return False
        bucket = self._bucketing.ask.bucket_for(shape)
        # Two passes that are prepared are faster than one that has to be compiled.
        return bucket.num_tokens <= self._max_positions and (not self.ready or bucket in self.ready)

    def _pass(self, plan: Plan, indices: Int32Array, phase: Phase, block_tables: Int32Array) -> Pass:
        whole = len(indices) == len(plan.slots)
        # Copies either way: the plan is committed by its own numbers, whatever a backend writes to its batch.
        lengths = plan.num_scheduled.copy() if whole else plan.num_scheduled[indices]
        starts = plan.starts.copy() if whole else plan.starts[indices]
        rows = plan.rows.copy() if whole else plan.rows[indices]
        is_single = plan.num_tokens == len(plan.slots)
        if is_single and self._counts_blocks:
            num_blocks = int(_sum(starts // self._block_size)) + len(starts)
            shape = Shape(len(starts), 1, num_blocks, Phase.DECODE)
        else:
            shape = self._shape(starts, lengths, rows, phase, block_tables)
        is_listed = self._listed or self.substitute
        bucket = self._bucket_for(shape) if is_listed else self._bucketing.ask.bucket_for(shape)
        if not self._ragged:
            self._note(shape, bucket)
            self._bucketing.ask.observe(shape, bucket)
        samples = plan.samples if whole else plan.samples[indices]
        num_logits = samples.astype(np.int32)
        if not is_single:
            num_logits *= 1 + plan.num_to_verify[indices]
        asks = self._table.num_prompt_logprobs
        return Pass(
            bucket=bucket,
            indices=indices,
            rows=rows,
            starts=starts,
            query_lens=lengths,
            num_logits=num_logits,
            num_prompt_logits=self._prompt_logits(plan, indices, starts, lengths)
            if asks
            else np.zeros(len(indices), np.int32),
        )

    def _bucket_for(self, shape: Shape) -> Bucket:
        bucket = self._bucketing.ask.bucket_for(shape)
        if bucket in self._listed:
            self.counts.num_hits += 1
        elif self._listed:
            self.counts.num_fallbacks += 1
            bucket = next((covering for covering in self._covering if covering.covers(shape)), bucket)
        if self.substitute is None:
            return bucket
        found = self.substitute(shape, bucket)
        self.counts.num_substituted += found != bucket
        return found

    def _shape(
        self, starts: Int32Array, lengths: Int32Array, rows: Int32Array, phase: Phase, block_tables: Int32Array
    ) -> Shape:
        if self._unified:
            return unified_shape(starts, lengths, block_tables[rows], block_size=self._block_size)
        if phase is Phase.PREFILL:
            return self._prefill_shape(starts, lengths)
        per_sequence = -(-(starts + lengths) // self._block_size)
        num_blocks = int(per_sequence.sum())
        if self._contiguous:
            num_blocks = 1 + max(
                int(block_tables[row, :count].max())
                for row, count in zip(rows.tolist(), per_sequence.tolist(), strict=True)
            )
        return Shape(len(lengths), int(lengths.max()), num_blocks, phase)

    def _prefill_shape(self, starts: Int32Array, lengths: Int32Array) -> Shape:
        num_blocks = -(-starts // self._block_size)
        if self._merges:
            return Shape(1, int(lengths.sum()), int(num_blocks.sum()))
        return Shape(len(lengths), int(lengths.max()), int(num_blocks.max()))

    def _group_shape(self, starts: Int32Array, lengths: Int32Array, rows: Int32Array) -> Shape:
        """Return the shape of a prefill pass that is not unified."""
        return self._prefill_shape(starts, lengths)

    def _prompt_logits(self, plan: Plan, indices: Int32Array, starts: Int32Array, lengths: Int32Array) -> Int32Array:
        """How many query tokens of each sequence are followed by a prompt token whose logprob was asked for."""
        counts = np.zeros(len(indices), np.int32)
        for i, slot in enumerate(plan.slots[indices].tolist()):
            sequence = self._table.sequences[slot]
            if sequence is not None and sequence.request.params.prompt_logprobs is not None:
                left = len(sequence.request.prompt_token_ids) - 1 - int(starts[i])
                counts[i] = max(0, min(int(lengths[i]), left))
        return counts

    def _note(self, shape: Shape, bucket: Bucket) -> None:
        if bucket not in self._used:
            self._used.add(bucket)
            self.counts.compiles = True
        if self.ready and bucket not in self.ready:
            self.counts.num_unprepared += 1
            if self._refuse_unprepared:
                raise UnpreparedShapeError(
                    f'{shape} fits no prepared bucket, and [bucketing] on_miss = "refuse".',
                    hint="Prepare larger buckets, or set bucketing.on_miss to fallback.",
                )
            self.ready.add(bucket)
            logger.warning("%s runs in %s, which was not prepared: it is compiled now.", shape, bucket)


def unified_shape(starts: Int32Array, query_lens: Int32Array, tables: Int32Array, *, block_size: int) -> UnifiedShape:
    """Return the shape of a pass; see :class:`UnifiedShape` for what shared and unique mean. Pure.

    Block tables say all that reference counts would, and more: only sequences of the pass read, and a sequence with several new
    tokens reads its blocks for each of them. Linear in the blocks that are read and in the highest id.

    Args:
        starts: Tokens computed before of each sequence, int32 ``[n]``, n at least 1.
        query_lens: New tokens of each, int32 ``[n]``.
        tables: Block ids of each, int32 ``[n, num_columns]``.
        block_size: Tokens per block.
    """
    # A single new token is written before the cache is read.
    num_cached = np.where(query_lens > 1, starts, starts + query_lens)
    num_read = -(-num_cached // block_size)
    width = int(num_read.max())
    blocks = tables[:, :width][np.arange(width) < num_read[:, None]]
    num_readers = np.bincount(blocks, weights=np.repeat(query_lens, num_read))
    unique = np.flatnonzero(num_readers == 1)
    return UnifiedShape(
        query_len=int(query_lens.sum()),
        num_blocks=int((num_readers > 1).sum()),
        num_unique_blocks=int(unique[-1]) + 1 if len(unique) else 0,
        is_causal=bool((query_lens > 1).any()),
    )
