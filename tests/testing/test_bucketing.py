"""The bucketing suite passes a small correct strategy and fails every broken one, each for the right reason."""

from __future__ import annotations

import re

import attrs
import pytest

from support.mutants import broken, proofs
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Phase, Shape
from trencadis_testing.bucketing import SAMPLE_LIMITS, BucketingConformance, legal_shapes


class Powers(BucketingStrategy):
    """Correct and slow: powers of two in both phases, the exact shape where they end. Each mutant breaks one thing."""

    def __init__(self, limits: BucketLimits) -> None:
        self.limits = limits
        self.table = self.buckets(limits)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        longest = min(limits.max_num_batched_tokens, limits.max_model_len)
        prefill = {Bucket(1, 2**i, 0) for i in range(longest.bit_length())}
        prefill |= {Bucket(1, 2**i, 1) for i in range(longest.bit_length())}
        decode = {
            Bucket(2**i, 1, min(2**j, limits.num_blocks), Phase.DECODE)
            for i in range(limits.max_num_seqs.bit_length())
            for j in range(i, 6)
            if 2**j <= limits.max_num_seqs * limits.max_blocks_per_sequence
        }
        return tuple(sorted(prefill)) + tuple(sorted(decode))

    def fitting(self, shape: Shape) -> list[Bucket]:
        return sorted((bucket for bucket in self.table if bucket.covers(shape)), key=self.cost)

    def cost(self, bucket: Bucket) -> int:
        if bucket.phase is Phase.PREFILL:
            return bucket.num_tokens * (128 + bucket.num_blocks)
        return bucket.num_blocks + 3 * bucket.num_tokens

    def bucket_for(self, shape: Shape) -> Bucket:
        fitting = self.fitting(shape)
        return fitting[0] if fitting else self.fallback(shape)

    def fallback(self, shape: Shape) -> Bucket:
        return Bucket.of(shape)


class TestPowers(BucketingConformance):
    make = Powers


class TableBeyondLimits(Powers):
    def buckets(self, limits):
        return (*super().buckets(limits), Bucket(2 * limits.max_num_seqs, 1, 1, Phase.DECODE))


class FallbackTooSmall(Powers):
    """The defect of the original: what exceeds every prepared bucket is cut to the largest."""

    def fallback(self, shape):
        return [bucket for bucket in self.table if bucket.phase is shape.phase][-1]


class LargestFitting(Powers):
    def bucket_for(self, shape):
        fitting = self.fitting(shape)
        return fitting[-1] if fitting else self.fallback(shape)


class FirstFitting(Powers):
    """The defect of the original: the first bucket in table order, here one of a batch of 1 that reads everything."""

    def buckets(self, limits):
        most = limits.num_blocks if limits.contiguous else limits.max_blocks_per_sequence
        extra = {Bucket(1, 1, most, Phase.DECODE)}
        table = super().buckets(limits)
        prefill = tuple(bucket for bucket in table if bucket.phase is Phase.PREFILL)
        decode = {bucket for bucket in table if bucket.phase is Phase.DECODE and bucket.batch_size > 1}
        return prefill + tuple(sorted(decode | extra))

    def bucket_for(self, shape):
        return next((bucket for bucket in self.table if bucket.covers(shape)), None) or self.fallback(shape)


class FallbackCreeps(Powers):
    def fallback(self, shape):
        more = min(shape.num_blocks + 1, self.limits.max_blocks_per_sequence)
        return Bucket(shape.batch_size, shape.query_len, max(shape.num_blocks, more), shape.phase)


class NeverShrinks(Powers):
    """Keeps a fallback for all that fits into it, so that the answer depends on what came before."""

    kept: Bucket | None = None

    def fallback(self, shape):
        if self.kept is None or not self.kept.covers(shape):
            self.kept = Bucket.of(shape)
        return self.kept


class LearnsAtOnce(Powers):
    def observe(self, shape, bucket):
        if bucket not in self.table:
            self.table = (*self.table, Bucket(*attrs.astuple(bucket)[:2], bucket.num_blocks + 1, bucket.phase))


class TableLearns(Powers):
    learnt: Bucket | None = None

    def observe(self, shape, bucket):
        self.learnt = Bucket.of(shape)

    def buckets(self, limits):
        table = super().buckets(limits)
        return table if self.learnt is None else (self.learnt, *table)


MUTANTS = {
    "test_table_holds_buckets_sorted_without_duplicates": [
        broken("UnsortedTable", Powers, buckets=lambda self, limits: Powers.buckets(self, limits)[::-1]),
        broken("ListAsTable", Powers, buckets=lambda self, limits: list(Powers.buckets(self, limits))),
        broken(
            "ShapesInTable", Powers, buckets=lambda self, limits: (Shape(1, 1, 0), *Powers.buckets(self, limits)[1:])
        ),
    ],
    "test_table_depends_on_the_limits_alone": [
        broken("TableOfConstructorLimits", Powers, buckets=lambda self, limits: Powers.buckets(self, self.limits))
    ],
    "test_table_lies_within_the_limits": [TableBeyondLimits],
    "test_bucket_covers_every_legal_shape": [FallbackTooSmall],
    "test_bucket_stays_within_the_limits": [
        broken(
            "FallbackBeyondLimits",
            Powers,
            fallback=lambda self, shape: Bucket(
                2 * self.limits.max_num_seqs + shape.batch_size, shape.query_len, shape.num_blocks, shape.phase
            ),
        )
    ],
    "test_fallback_is_made_only_where_no_prepared_bucket_fits": [
        broken("NothingPreparedIsUsed", Powers, bucket_for=lambda self, shape: Bucket.of(shape))
    ],
    "test_prepared_bucket_serves_its_own_shape": [LargestFitting],
    "test_no_cheaper_prepared_bucket_fits": [FirstFitting],
    "test_padding_a_padded_shape_changes_nothing": [FallbackCreeps],
    "test_same_shape_gets_the_same_bucket_whatever_was_asked_before": [NeverShrinks],
    "test_observing_changes_no_answer": [LearnsAtOnce, TableLearns],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(BucketingConformance, MUTANTS)


def test_suite_lets_a_strategy_say_that_it_prepares_more_on_purpose(failures_of):
    class Lenient(BucketingConformance):
        def is_within(self, bucket, limits):
            return bucket.batch_size <= 2 * limits.max_num_seqs

    test = "test_table_lies_within_the_limits"
    assert failures_of(BucketingConformance, TableBeyondLimits, only=test)
    assert not failures_of(Lenient, TableBeyondLimits, only=test)


def test_failure_names_the_smallest_shape():
    suite = type("Suite", (BucketingConformance,), {"make": FallbackTooSmall})()
    limits = SAMPLE_LIMITS["uneven"]
    strategy = FallbackTooSmall(limits)
    smallest = min(shape for shape in legal_shapes(limits) if not strategy.bucket_for(shape).covers(shape))
    with pytest.raises(AssertionError, match=re.escape(f"{smallest} does not fit into")):
        suite.test_bucket_covers_every_legal_shape(limits)


@pytest.mark.parametrize("limits", SAMPLE_LIMITS.values(), ids=SAMPLE_LIMITS.keys())
def test_legal_shapes_hold_the_largest_of_each_phase(limits):
    shapes = legal_shapes(limits)
    prefill = [shape for shape in shapes if shape.phase is Phase.PREFILL]
    decode = [shape for shape in shapes if shape.phase is Phase.DECODE]
    assert max(shape.query_len for shape in prefill) == limits.max_prefill_query_len
    assert max(shape.batch_size for shape in decode) == min(limits.max_num_seqs, limits.max_num_batched_tokens)
    assert max(shape.batch_size - 1 + shape.query_len for shape in shapes) <= limits.max_num_batched_tokens
    assert all(shape.num_blocks >= shape.batch_size for shape in decode)
