from __future__ import annotations

import logging

import attrs
import pytest

from trencadis.records import BucketLimits, Phase, Shape, UnifiedBucket
from trencadis_plugins.bucketing.config import UnifiedConfig
from trencadis_plugins.bucketing.unified import Unified
from trencadis_plugins.bucketing.unified_table import unified_buckets
from trencadis_testing.bucketing import UNIFIED_LIMITS, BucketingConformance, UnifiedBucketingConformance, legal_shapes

LIMITS = BucketLimits(
    block_size=128,
    max_model_len=1024,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    max_prefill_batch_size=8,
    num_blocks=5781,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
)


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


def test_contiguous_counts_end_with_the_cache():
    assert sizes("alpha", "num_blocks", Phase.DECODE, attrs.evolve(LIMITS, contiguous=True))[-3:] == [1445, 2890, 5781]


@pytest.mark.parametrize("form", ["alpha", "exponential"])
def test_unified_table_is_the_vendors_and_the_largest_passes(form):
    limits = attrs.evolve(LIMITS, unified=True)
    found = Unified(limits, UnifiedConfig(form=form)).buckets(limits)
    tops = {UnifiedBucket(2048, 256, 5781, True), UnifiedBucket(32, 256, 5781, False)}
    assert set(found) == {*unified_buckets(limits, form), *tops}


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
