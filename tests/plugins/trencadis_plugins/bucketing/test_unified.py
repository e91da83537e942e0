from __future__ import annotations

import logging

import attrs
import pytest

from support.strategies.bucket_cases import SMALL
from trencadis.records import Phase, Shape, UnifiedBucket
from trencadis_plugins.bucketing.config import UnifiedConfig
from trencadis_plugins.bucketing.unified import (
    Unified,
    alpha_points,
    exponential_points,
    unified_buckets,
)
from trencadis_testing.bucketing import UNIFIED_LIMITS, BucketingConformance, UnifiedBucketingConformance, legal_shapes

LIMITS = attrs.evolve(SMALL, max_num_seqs=32, max_num_batched_tokens=2048, max_prefill_batch_size=8)


class TestPadded(BucketingConformance):
    make = Unified


class TestPaddedAlpha(BucketingConformance):
    def make(self, limits):
        return Unified(limits, UnifiedConfig(form="alpha"))


class TestUnified(UnifiedBucketingConformance):
    make = Unified


class TestUnifiedAlpha(UnifiedBucketingConformance):
    def make(self, limits):
        return Unified(limits, UnifiedConfig(form="alpha"))


def sizes(form, dimension, phase, limits=LIMITS):
    buckets = Unified(limits, UnifiedConfig(form=form)).buckets(limits)
    return sorted({getattr(bucket, dimension) for bucket in buckets if bucket.phase is phase})


@pytest.mark.parametrize(
    ("form", "dimension", "phase", "expected"),
    [
        ("alpha", "batch_size", Phase.PREFILL, [1, 2, 4, 8]),
        ("alpha", "query_len", Phase.PREFILL, [8, 16, 32, 256, 512, 1024]),
        ("alpha", "num_blocks", Phase.PREFILL, [0, 2, 4, 8]),
        ("alpha", "batch_size", Phase.DECODE, [8, 16, 32]),
        ("alpha", "num_blocks", Phase.DECODE, [8, 16, 32, 64, 128, 256]),
        ("exponential", "batch_size", Phase.PREFILL, [1, 8]),
        ("exponential", "num_blocks", Phase.PREFILL, [0, 8]),
        ("exponential", "batch_size", Phase.DECODE, [32]),
        ("exponential", "num_blocks", Phase.DECODE, [32, 64, 96, 160, 256]),
    ],
)
def test_each_dimension_has_the_sizes_of_the_form(form, dimension, phase, expected):
    assert sizes(form, dimension, phase) == expected


@pytest.mark.parametrize("form", ["alpha", "exponential"])
def test_prompt_for_which_a_batch_of_two_is_too_large_is_prepared_alone(form):
    limits = attrs.evolve(
        LIMITS, block_size=16, max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64, max_prefill_batch_size=2
    )
    strategy = Unified(limits, UnifiedConfig(form=form))
    assert strategy.bucket_for(Shape(1, 49, 0)) in strategy.buckets(limits)


@pytest.mark.parametrize("form", ["alpha", "exponential"])
def test_unified_table_is_the_vendors_and_the_largest_passes(form):
    limits = attrs.evolve(LIMITS, unified=True)
    found = Unified(limits, UnifiedConfig(form=form)).buckets(limits)
    tops = {UnifiedBucket(2048, 256, 5781, True), UnifiedBucket(32, 128, 5781, False)}
    assert set(found) == {*unified_buckets(limits, form), *tops}
    assert len(found) == {"alpha": 375, "exponential": 167 + 2}[form]


@pytest.mark.parametrize("form", ["alpha", "exponential"])
@pytest.mark.parametrize("limits", UNIFIED_LIMITS.values(), ids=UNIFIED_LIMITS)
def test_every_legal_unified_shape_has_a_prepared_bucket(form, limits):
    strategy = Unified(limits, UnifiedConfig(form=form))
    table = set(strategy.buckets(limits))
    assert {strategy.bucket_for(shape) for shape in legal_shapes(limits, seed=1)} <= table


def test_unified_table_is_logged_with_its_four_dimensions(caplog):
    with caplog.at_level(logging.INFO):
        Unified(attrs.evolve(LIMITS, unified=True), UnifiedConfig(form="alpha"))
    assert "unified buckets [query, shared_blocks, unique_blocks, is_causal]: [(8, 0, 0, 1)," in caplog.text


def limits(seqs, length, tokens, blocks, block_size=128):
    return attrs.evolve(
        SMALL,
        block_size=block_size,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        num_blocks=blocks,
    )


def values(buckets, name):
    return sorted({getattr(bucket, name) for bucket in buckets})


@pytest.mark.parametrize("length", [1024, 1100, 1151])
def test_alpha_table_equals_the_vendors(length):
    buckets = unified_buckets(limits(32, length, 2048, 5781), "alpha")
    assert len(buckets) == 375
    assert values(buckets, "query_len") == [8, 16, 32, 512, 1024, 2048]
    assert values(buckets, "num_blocks") == [0, 8, 16, 32, 64, 128, 256]
    assert values(buckets, "num_unique_blocks") == [0, 8, 16, 32, 1445, 2890, 5781]
    assert buckets[:2] == (UnifiedBucket(8, 0, 0, True), UnifiedBucket(8, 0, 8, False))
    assert buckets[-2:] == (UnifiedBucket(2048, 256, 2890, True), UnifiedBucket(2048, 256, 5781, True))
    assert [bucket.num_unique_blocks for bucket in buckets[::-1][1:4]] == [2890, 1445, 32]


def test_exponential_table_equals_the_vendors():
    buckets = unified_buckets(limits(32, 1024, 2048, 5781), "exponential")
    assert len(buckets) == 167
    assert values(buckets, "query_len") == [32, 96, 192, 384, 896, 2048]
    assert values(buckets, "num_blocks") == [0, 8, 32]
    assert values(buckets, "num_unique_blocks") == [0, 32, 64, 128, 352, 864, 2240, 5781]


def test_other_tables_are_as_large_as_the_vendors():
    assert len(unified_buckets(limits(4, 1024, 1024, 300), "alpha")) == 354
    assert len(unified_buckets(limits(128, 4096, 8192, 1519), "exponential")) == 125


def test_alpha_points_are_quarters_halves_and_wholes_without_nothing():
    assert alpha_points(2048, 32) == {8, 16, 32, 512, 1024, 2048}
    assert alpha_points(3, 2) == {1, 2, 3}
    assert alpha_points(0, 4) == {1, 2, 4}


def test_exponential_points_end_with_the_maximum_and_are_multiples_else():
    assert exponential_points(8, 32) == {8, 32}
    assert exponential_points(1, 1) == {1}
    assert exponential_points(0, 4) == set()


@pytest.mark.parametrize("form", ["alpha", "exponential"])
@pytest.mark.parametrize(
    "case",
    [limits(1, 1, 1, 1, 1), limits(2, 10, 8, 2, 16), limits(7, 250, 100, 40, 16), limits(32, 1024, 2048, 5781)],
)
def test_some_bucket_is_left_and_no_empty_pass_nor_one_of_more_decodes_than_sequences(form, case):
    buckets = unified_buckets(case, form)
    assert any(bucket.is_causal for bucket in buckets)
    assert all(bucket.query_len >= 1 for bucket in buckets)
    assert all(bucket.is_causal or bucket.num_blocks or bucket.num_unique_blocks for bucket in buckets)
    assert max((bucket.query_len for bucket in buckets if not bucket.is_causal), default=0) <= case.max_num_seqs
    assert list(buckets) == sorted(set(buckets))
