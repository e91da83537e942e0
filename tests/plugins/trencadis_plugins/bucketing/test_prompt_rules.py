from __future__ import annotations

import attrs
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.strategies.bucket_cases import SMALL
from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.config import ExponentialConfig, LinearConfig, PaddingAwareConfig
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_plugins.bucketing.linear import Linear
from trencadis_plugins.bucketing.padding_aware import PaddingAware
from trencadis_plugins.bucketing.prompt_rules import PromptRules

LIMITS = attrs.evolve(SMALL, max_model_len=32768, max_num_batched_tokens=16384)
SMALLER = attrs.evolve(LIMITS, max_model_len=4096, max_num_batched_tokens=2048)
MAKERS = [(Exponential, ExponentialConfig), (Linear, LinearConfig), (PaddingAware, PaddingAwareConfig)]
CHUNKS, SLICES = PromptRules(query_chunk=256), PromptRules(slice_queries=True)


def query_lens(strategy, limits, contexts=range(10**6)):
    table = strategy.buckets(limits)
    return {item.query_len for item in table if item.phase is Phase.PREFILL and item.num_blocks in contexts}


@pytest.mark.parametrize(
    ("rules", "asked", "allowed"),
    [
        (PromptRules(), 4097, 4097),
        (CHUNKS, 1, 256),
        (CHUNKS, 256, 256),
        (CHUNKS, 257, 512),
        (SLICES, 8191, 8191),
        (SLICES, 8192, 8192),
        (SLICES, 8193, 9216),
        (PromptRules(query_chunk=300, slice_queries=True), 8191, 76_800),
        (PromptRules(query_chunk=256, slice_queries=True), 8200, 9216),
        (PromptRules(slice_queries=True, slice_tokens=100, slice_threshold=150), 151, 200),
    ],
)
def test_query_is_rounded_up_to_whole_chunks_and_from_the_threshold_on_to_whole_slices(rules, asked, allowed):
    assert rules.rounded(asked) == allowed
    assert rules.rounded(allowed) == allowed


@pytest.mark.parametrize(("chunk", "base"), [(0, 32), (8, 32), (20, 40), (32, 32), (48, 48), (256, 256)])
def test_fallback_queries_are_whole_chunks_of_32_tokens_at_least(chunk, base):
    assert PromptRules(query_chunk=chunk).fallback_base == base


@pytest.mark.parametrize(("make", "config"), MAKERS)
def test_chunks_round_the_query_lengths_of_a_strategy(make, config):
    usual = query_lens(make(SMALLER, config()), SMALLER)
    assert query_lens(make(SMALLER, config(prompts=CHUNKS)), SMALLER) == {-(-size // 256) * 256 for size in usual}


@pytest.mark.parametrize(("make", "config"), MAKERS)
def test_budget_that_is_not_whole_chunks_is_refused(make, config):
    limits = attrs.evolve(LIMITS, max_num_batched_tokens=1000)
    with pytest.raises(ConfigValueError, match=r"\.prompts\] query_chunk = 256: .*_tokens = 1000 .* Set .* to 1024\."):
        make(limits, config(prompts=CHUNKS))


@pytest.mark.parametrize(("make", "config"), MAKERS)
def test_long_queries_without_context_are_whole_slices_and_all_others_stay(make, config):
    slices = PromptRules(slice_queries=True, slice_tokens=512, slice_threshold=600)
    usual, sliced = (make(SMALLER, config(prompts=rules)).buckets(SMALLER) for rules in (PromptRules(), slices))
    dropped = set(usual) - set(sliced)
    assert set(sliced) < set(usual)
    assert dropped == {
        bucket
        for bucket in usual
        if bucket.phase is Phase.PREFILL
        and bucket.num_blocks == 0
        and bucket.query_len >= 600
        and bucket.query_len % 512
    }


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [
        (Shape(1, 8999, 0), Bucket(1, 9216, 0)),
        (Shape(1, 9217, 3), Bucket(1, 10240, 32 * 2)),
        (Shape(1, 235, 0), Bucket(1, 448, 0)),
    ],
)
def test_fallback_of_a_long_query_is_whole_slices_and_of_a_short_one_as_ever(shape, bucket):
    limits = attrs.evolve(LIMITS, max_num_batched_tokens=10000)
    assert Exponential(limits, ExponentialConfig(prompts=SLICES)).fallback(shape) == bucket


def test_long_query_for_which_no_slices_are_prepared_runs_beside_empty_context():
    """Only buckets without context are whole slices: one with context serves, where it is the cheapest left."""
    limits = attrs.evolve(LIMITS, max_num_batched_tokens=9000)
    strategy = Exponential(limits, ExponentialConfig(prompts=SLICES))
    assert strategy.bucket_for(Shape(1, 8999, 0)) == Bucket(1, 9000, 1)


@settings(max_examples=60, phases=[Stage.explicit, Stage.generate])
@given(
    chunk=st.sampled_from([0, 4, 12, 32, 100]),
    slice_tokens=st.sampled_from([0, 16, 48]),
    threshold=st.integers(1, 300),
    budget=st.integers(1, 9),
    which=st.integers(0, 2),
    data=st.data(),
)
def test_bucket_covers_and_obeys_the_rules_wherever_it_is_made(chunk, slice_tokens, threshold, budget, which, data):
    rules = PromptRules(
        query_chunk=chunk, slice_queries=slice_tokens > 0, slice_tokens=slice_tokens or 1, slice_threshold=threshold
    )
    limits = attrs.evolve(
        LIMITS,
        block_size=16,
        max_model_len=data.draw(st.integers(2, 500)),
        max_num_batched_tokens=budget * (chunk or 33),
        max_prefill_batch_size=data.draw(st.integers(1, 3)),
        num_blocks=90,
    )
    make, config = MAKERS[which]
    strategy = make(limits, config(prompts=rules))
    for _ in range(6):
        query_len = data.draw(st.integers(1, limits.max_prefill_query_len))
        shape = Shape(1, query_len, data.draw(st.integers(0, -(-(limits.max_model_len - query_len) // 16))))
        bucket = strategy.bucket_for(shape)
        assert bucket.covers(shape)
        assert bucket.query_len % (chunk or 1) == 0
        assert rules.allows(bucket)
        assert strategy.bucket_for(Bucket.of(bucket)) == bucket
