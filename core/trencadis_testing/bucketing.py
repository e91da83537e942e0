"""Conformance suite of the noun ``bucketing``."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import ClassVar

import pytest

from trencadis.errors import ContractError
from trencadis.interfaces import BucketingStrategy, legal
from trencadis.records import Bucket, BucketLimits, Phase, Shape, UnifiedBucket, UnifiedShape

__all__ = [
    "SAMPLE_LIMITS",
    "UNIFIED_LIMITS",
    "BucketingConformance",
    "UnifiedBucketingConformance",
    "legal_shapes",
]


def _limits(
    *,
    block: int,
    length: int,
    seqs: int,
    tokens: int,
    blocks: int,
    batch: int = 1,
    contiguous: bool = False,
    prefixes: bool | None = None,
    k: int = 0,
    merged: int = 1,
    unified: bool = False,
) -> BucketLimits:
    return BucketLimits(
        block_size=block,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_prefill_batch_size=batch,
        num_blocks=blocks,
        contiguous=contiguous,
        prefix_caching=not contiguous if prefixes is None else prefixes,
        max_draft_tokens=k,
        max_merged_prefills=merged,
        unified=unified,
    )


SAMPLE_LIMITS = {
    "tiny": _limits(block=1, length=2, seqs=1, tokens=1, blocks=2),
    "shorter_than_a_block": _limits(block=16, length=10, seqs=2, tokens=8, blocks=2),
    "uneven": _limits(block=16, length=250, seqs=7, tokens=100, blocks=40, batch=3),
    "contiguous": _limits(block=128, length=1024, seqs=4, tokens=1024, blocks=300, contiguous=True),
    "contiguous_drafts": _limits(
        block=16, length=200, seqs=6, tokens=128, blocks=70, contiguous=True, prefixes=True, k=2
    ),
    "no_prefixes": _limits(block=16, length=256, seqs=8, tokens=128, blocks=90, batch=2, prefixes=False),
    "small_cache": _limits(block=16, length=512, seqs=16, tokens=256, blocks=33, batch=4),
    "drafts": _limits(block=16, length=512, seqs=8, tokens=256, blocks=200, batch=2, k=3),
    "long_context": _limits(block=128, length=16384, seqs=16, tokens=2048, blocks=500),
    "merged": _limits(block=16, length=250, seqs=8, tokens=600, blocks=90, merged=4),
}
"""Limits that every strategy must cope with, by name."""

UNIFIED_LIMITS = {
    "tiny": _limits(block=1, length=2, seqs=1, tokens=1, blocks=2, unified=True),
    "shorter_than_a_block": _limits(block=16, length=10, seqs=2, tokens=8, blocks=2, unified=True),
    "uneven": _limits(block=16, length=250, seqs=7, tokens=100, blocks=40, unified=True),
    "fewer_tokens_than_sequences": _limits(block=16, length=256, seqs=16, tokens=12, blocks=64, unified=True),
    "no_prefixes": _limits(block=16, length=256, seqs=8, tokens=128, blocks=90, prefixes=False, unified=True),
    "small_cache": _limits(block=16, length=512, seqs=16, tokens=256, blocks=33, unified=True),
    "drafts": _limits(block=16, length=512, seqs=8, tokens=256, blocks=200, k=3, unified=True),
    "long_context": _limits(block=128, length=16384, seqs=16, tokens=2048, blocks=500, unified=True),
}
"""Limits that a strategy which provides ``bucketing.unified`` must cope with, by name."""


class _Rules:
    """The tests of both suites."""

    kind: ClassVar[type[Bucket]] = Bucket

    def make(self, limits: BucketLimits) -> BucketingStrategy:
        """Return a new strategy, as its factory does for ``context.limits``."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourStrategy, or a method make(self, limits)")

    def cost(self, bucket: Shape) -> int:
        """Return what a pass in ``bucket`` costs, in any unit; override it with what your strategy minimises.

        It must grow with every dimension. By default: in prefill, token positions × (128 + context blocks); in decode,
        KV blocks + 3 × token positions; of a unified pass, token positions × (128 + shared blocks, and a block for every
        128 of the positions if it is causal) + unique blocks.
        """
        if isinstance(bucket, UnifiedShape):
            own_blocks = -(-bucket.num_tokens // 128) if bucket.is_causal else 0
            return bucket.num_tokens * (128 + bucket.num_blocks + own_blocks) + bucket.num_unique_blocks
        if bucket.phase is Phase.PREFILL:
            return bucket.num_tokens * (128 + bucket.num_blocks)
        return bucket.num_blocks + 3 * bucket.num_tokens

    def is_within(self, bucket: Bucket, limits: BucketLimits) -> bool:
        """Return whether a legal pass may run in ``bucket``; override it if yours prepares more on purpose, and say why."""
        return _within(bucket, limits)

    def test_table_holds_buckets_sorted_without_duplicates(self, limits: BucketLimits) -> None:
        """Prefill comes before decode, and each phase ascends by its fields."""
        table = self.make(limits).buckets(limits)
        assert isinstance(table, tuple), f"buckets() returned {type(table).__name__}, not a tuple"
        assert all(type(bucket) is self.kind for bucket in table), f"buckets() holds what is no {self.kind.__name__}"
        keys = [(bucket.phase is Phase.DECODE, bucket) for bucket in table]
        unsorted = [later[1] for earlier, later in itertools.pairwise(keys) if not earlier < later]
        assert not unsorted, f"out of order or twice in the table: {unsorted[0]}"

    def test_table_depends_on_the_limits_alone(self, limits: BucketLimits) -> None:
        """Neither earlier calls nor the limits a strategy was built with change the table for given limits."""
        strategy = self.make(limits)
        first = strategy.buckets(limits)
        for shape in legal_shapes(limits, count=5):
            strategy.bucket_for(shape)
        assert strategy.buckets(limits) == first, "buckets(limits) changed after bucket_for() was called"
        for other in (UNIFIED_LIMITS if limits.unified else SAMPLE_LIMITS).values():
            assert self.make(other).buckets(limits) == first, f"buckets(limits) depends on the constructor's {other}"

    def test_table_lies_within_the_limits(self, limits: BucketLimits) -> None:
        """Nothing is prepared that no step can need; queries may be rounded up to a block."""
        outside = [bucket for bucket in self.make(limits).buckets(limits) if not self.is_within(bucket, limits)]
        assert not outside, f"prepared, but larger than {limits}: {outside[0]}"

    def test_bucket_covers_every_legal_shape(self, limits: BucketLimits) -> None:
        """A bucket is never smaller than the request, in no dimension, and of the same phase (or causal, if unified)."""
        strategy = self.make(limits)
        answers = {shape: strategy.bucket_for(shape) for shape in legal_shapes(limits)}
        wrong = [shape for shape, bucket in answers.items() if not self._serves(bucket, shape)]
        assert not wrong, f"{min(wrong)} does not fit into {answers[min(wrong)]}"

    def _serves(self, bucket: Bucket, shape: Shape) -> bool:
        with contextlib.suppress(ContractError):
            return type(legal(BucketingStrategy.bucket_for, bucket, shape)) is self.kind
        return False

    def test_bucket_stays_within_the_limits(self, limits: BucketLimits) -> None:
        """Memory was measured for legal shapes: rounding, or a fallback, must not go beyond the largest of them."""
        strategy = self.make(limits)
        wrong = [shape for shape in legal_shapes(limits) if not self.is_within(strategy.bucket_for(shape), limits)]
        assert not wrong, f"{min(wrong)} runs in {strategy.bucket_for(min(wrong))}, beyond {limits}"

    def test_prepared_bucket_serves_its_own_shape(self, limits: BucketLimits) -> None:
        """A shape that was prepared exactly is not padded."""
        strategy = self.make(limits)
        shapes = [_shape(bucket) for bucket in strategy.buckets(limits)]
        wrong = [shape for shape in shapes if strategy.bucket_for(shape) != Bucket.of(shape)]
        assert not wrong, f"{min(wrong)} is prepared, but runs in {strategy.bucket_for(min(wrong))}"

    def test_fallback_is_made_only_where_no_prepared_bucket_fits(self, limits: BucketLimits) -> None:
        """Every fallback may cost a compilation in the middle of serving."""
        strategy = self.make(limits)
        table = strategy.buckets(limits)
        for shape in sorted(legal_shapes(limits)):
            fitting = [bucket for bucket in table if bucket.covers(shape)]
            answer = strategy.bucket_for(shape)
            assert not fitting or answer in fitting, f"{shape}: {fitting[0]} is prepared, but {answer} was made"

    def test_no_cheaper_prepared_bucket_fits(self, limits: BucketLimits) -> None:
        """Among the prepared buckets that cover a shape the cheapest by ``cost`` is chosen."""
        strategy = self.make(limits)
        table = strategy.buckets(limits)
        for shape in sorted(legal_shapes(limits)):
            cheapest = min((bucket for bucket in table if bucket.covers(shape)), key=self.cost, default=None)
            if cheapest is not None:
                answer = strategy.bucket_for(shape)
                assert self.cost(answer) <= self.cost(cheapest), f"{shape} runs in {answer}, but {cheapest} is cheaper"

    def test_padding_a_padded_shape_changes_nothing(self, limits: BucketLimits) -> None:
        """The bucket of a bucket's shape is that bucket, prepared or not."""
        strategy = self.make(limits)
        wrong = []
        for shape in legal_shapes(limits):
            bucket = strategy.bucket_for(shape)
            if strategy.bucket_for(_shape(bucket)) != bucket:
                wrong.append(shape)
        assert not wrong, f"{min(wrong)} runs in {strategy.bucket_for(min(wrong))}, whose own shape runs in another"

    def test_same_shape_gets_the_same_bucket_whatever_was_asked_before(self, limits: BucketLimits) -> None:
        """Warm-up, replay and every rank ask in an order of their own."""
        shapes = sorted(legal_shapes(limits))
        forwards, backwards = self.make(limits), self.make(limits)
        first = {shape: forwards.bucket_for(shape) for shape in shapes}
        second = {shape: backwards.bucket_for(shape) for shape in reversed(shapes)}
        wrong = [shape for shape in shapes if not first[shape] == second[shape] == forwards.bucket_for(shape)]
        assert not wrong, f"{min(wrong)} got {first[min(wrong)]} or another bucket, depending on earlier calls"

    def test_observing_changes_no_answer(self, limits: BucketLimits) -> None:
        """What a strategy learns may show in its next life, not in this one."""
        strategy = self.make(limits)
        shapes = sorted(legal_shapes(limits))
        table = strategy.buckets(limits)
        before = [strategy.bucket_for(shape) for shape in shapes]
        for shape, bucket in zip(shapes, before, strict=True):
            strategy.observe(shape, bucket)
        wrong = [shape for shape, bucket in zip(shapes, before, strict=True) if strategy.bucket_for(shape) != bucket]
        assert not wrong, f"the bucket of {min(wrong)} changed after observe()"
        assert strategy.buckets(limits) == table, "the table changed after observe()"


@pytest.mark.parametrize("limits", SAMPLE_LIMITS.values(), ids=SAMPLE_LIMITS.keys())
class BucketingConformance(_Rules):
    """What every bucketing strategy must do; inherit from it, and set ``make``.

    Each test runs under every one of :data:`SAMPLE_LIMITS`, over the largest legal shapes and random ones.
    A failure names the smallest shape that shows it. Example::

        class TestFibonacci(BucketingConformance):
            make = Fibonacci
    """


@pytest.mark.parametrize("limits", UNIFIED_LIMITS.values(), ids=UNIFIED_LIMITS.keys())
class UnifiedBucketingConformance(_Rules):
    """What a strategy that provides ``bucketing.unified`` must do as well: the same, with unified shapes.

    Each test runs under every one of :data:`UNIFIED_LIMITS`.
    """

    kind = UnifiedBucket


def legal_shapes(limits: BucketLimits, *, count: int = 120, seed: int = 0) -> set[Shape]:
    """Return the smallest and largest legal shapes of both phases and up to ``count`` random ones of each. Pure.

    Sizes are spread evenly over orders of magnitude. A batch's longest query leaves at least one token of the budget to
    every other sequence. Unified shapes where the limits say so.
    """
    rng = random.Random(seed)
    if limits.unified:
        return {*_unified_corners(limits), *_random_unified(limits, rng, count)}
    shapes = set(_corners(limits))
    for _ in range(count):
        batch_size = _spread(rng, 1, _max_batch(limits, Phase.PREFILL))
        query_len = _spread(rng, 1, _max_query(limits, Phase.PREFILL, batch_size))
        shapes.add(Shape(batch_size, query_len, _spread(rng, 0, _max_context(limits, batch_size, query_len))))
        batch_size = _spread(rng, 1, _max_batch(limits, Phase.DECODE))
        query_len = rng.randint(1, _max_query(limits, Phase.DECODE, batch_size))
        num_blocks = _spread(rng, *_decode_blocks(limits, batch_size))
        shapes.add(Shape(batch_size, query_len, num_blocks, Phase.DECODE))
    return shapes


def _corners(limits: BucketLimits) -> Iterator[Shape]:
    for batch_size in {1, _max_batch(limits, Phase.PREFILL)}:
        for query_len in {1, _max_query(limits, Phase.PREFILL, batch_size)}:
            yield Shape(batch_size, query_len, 0)
            yield Shape(batch_size, query_len, _max_context(limits, batch_size, query_len))
    for batch_size in {1, _max_batch(limits, Phase.DECODE)}:
        for query_len in {1, _max_query(limits, Phase.DECODE, batch_size)}:
            for num_blocks in _decode_blocks(limits, batch_size):
                yield Shape(batch_size, query_len, num_blocks, Phase.DECODE)


def _unified_corners(limits: BucketLimits) -> Iterator[UnifiedShape]:
    most = limits.max_num_batched_tokens
    if most > 1:
        yield UnifiedShape(2, 0, 0, True)
        yield UnifiedShape(most, _max_shared(limits, most, True), 0, True)
        # The only unique block may be the last of the cache.
        yield UnifiedShape(most, min(limits.num_blocks - 1, _max_shared(limits, most, True)), limits.num_blocks, True)
    decodes = min(most, limits.max_num_seqs)
    yield UnifiedShape(1, 0, 1, False)
    yield UnifiedShape(
        decodes, min(limits.num_blocks - 1, _max_shared(limits, decodes, False)), limits.num_blocks, False
    )


def _random_unified(limits: BucketLimits, rng: random.Random, count: int) -> Iterator[UnifiedShape]:
    for is_causal in (True, False):
        most = limits.max_num_batched_tokens if is_causal else min(limits.max_num_batched_tokens, limits.max_num_seqs)
        for _ in range(count if most > is_causal else 0):
            query_len = _spread(rng, 1 + is_causal, most)
            shared = _spread(rng, 0, _max_shared(limits, query_len, is_causal))
            unique = _spread(rng, 0, limits.num_blocks)
            if is_causal or shared or unique:
                yield UnifiedShape(query_len, shared, unique, is_causal)


def _max_shared(limits: BucketLimits, query_len: int, is_causal: bool) -> int:
    """A prompt's context is shared by its own tokens; a decode shares with others what they have in common."""
    if not is_causal and not limits.prefix_caching:
        return 0
    readers = query_len if is_causal else query_len // 2
    return min(limits.num_blocks, min(readers, limits.max_num_seqs) * limits.max_blocks_per_sequence)


def _max_batch(limits: BucketLimits, phase: Phase) -> int:
    most = limits.max_prefill_batch_size if phase is Phase.PREFILL else limits.max_num_seqs
    return min(most, limits.max_num_batched_tokens)


def _max_query(limits: BucketLimits, phase: Phase, batch_size: int) -> int:
    left = limits.max_num_batched_tokens - (batch_size - 1)
    return min(left, limits.max_prefill_query_len if phase is Phase.PREFILL else 1 + limits.max_draft_tokens)


def _max_context(limits: BucketLimits, batch_size: int, query_len: int) -> int:
    """In a larger batch the longest context may belong to a sequence with a single new token."""
    if limits.max_merged_prefills > 1:
        return min(limits.max_merged_prefills, query_len) * -(-(limits.max_model_len - 1) // limits.block_size)
    left = limits.max_model_len - (query_len if batch_size == 1 else 1)
    return -(-left // limits.block_size)


def _decode_blocks(limits: BucketLimits, batch_size: int) -> tuple[int, int]:
    if limits.contiguous:
        return batch_size, limits.num_blocks
    most = batch_size * limits.max_blocks_per_sequence
    return batch_size, max(batch_size, most if limits.prefix_caching else min(most, limits.num_blocks))


def _spread(rng: random.Random, low: int, high: int) -> int:
    span = high - low + 1
    return low + min(span - 1, int(span ** rng.random()) - 1 + rng.randint(0, 1))


def _shape(bucket: Bucket) -> Shape:
    if isinstance(bucket, UnifiedBucket):
        return UnifiedShape(bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks, bucket.is_causal)
    return Shape(bucket.batch_size, bucket.query_len, bucket.num_blocks, bucket.phase)


def _within(bucket: Bucket, limits: BucketLimits) -> bool:
    if isinstance(bucket, UnifiedBucket):
        most = limits.max_num_batched_tokens
        return (
            bucket.query_len <= (most if bucket.is_causal else min(most, limits.max_num_seqs))
            and bucket.num_blocks <= min(limits.num_blocks, limits.max_num_seqs * limits.max_blocks_per_sequence)
            and bucket.num_unique_blocks <= limits.num_blocks
        )
    if bucket.phase is Phase.PREFILL:
        longest = min(limits.max_num_batched_tokens, limits.max_merged_prefills * limits.max_model_len)
        return (
            bucket.batch_size <= limits.max_prefill_batch_size
            and bucket.query_len <= -(-longest // limits.block_size) * limits.block_size
            and bucket.num_blocks <= limits.max_merged_prefills * limits.max_blocks_per_sequence
        )
    most = limits.num_blocks if limits.contiguous else limits.max_num_seqs * limits.max_blocks_per_sequence
    return (
        bucket.batch_size <= limits.max_num_seqs
        and bucket.query_len <= 1 + limits.max_draft_tokens
        and bucket.num_blocks <= most
    )
