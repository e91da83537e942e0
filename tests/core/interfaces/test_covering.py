from __future__ import annotations

import attrs
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.interfaces import BucketingStrategy, covering_buckets
from trencadis.records import Bucket, BucketLimits, FinishReason, Phase, Request, SamplingParams, Shape
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_plugins.bucketing.linear import Linear
from trencadis_plugins.bucketing.padding_aware import PaddingAware
from trencadis_plugins.bucketing.unified import Unified
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

LIMITS = BucketLimits(
    block_size=16,
    max_model_len=96,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_prefill_batch_size=2,
    num_blocks=24,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
)


class ByHand(BucketingStrategy):
    """A table by hand; the exact shape where it ends."""

    def __init__(self, *table: Bucket) -> None:
        self.table = table

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        return self.table

    def bucket_for(self, shape: Shape) -> Bucket:
        return next((bucket for bucket in self.table if bucket.covers(shape)), None) or Bucket.of(shape)


def covering(strategy: BucketingStrategy, limits: BucketLimits = LIMITS) -> tuple[Bucket, ...]:
    return covering_buckets(strategy.bucket_for, strategy.buckets(limits), limits)


def test_complete_table_gets_nothing() -> None:
    assert covering(ByHand(Bucket(1, 64, 6), Bucket(4, 1, 24, Phase.DECODE))) == ()


def test_bucket_covers_what_is_missed_and_is_no_larger() -> None:
    """The chunk of a prompt that begins in its last block: 15 tokens at most, behind six blocks of context."""
    assert covering(ByHand(Bucket(1, 64, 5), Bucket(4, 1, 24, Phase.DECODE))) == (Bucket(1, 15, 6),)
    assert covering(ByHand(Bucket(1, 64, 6), Bucket(2, 1, 24, Phase.DECODE))) == (Bucket(4, 1, 24, Phase.DECODE),)


def test_drafts_make_decodes_longer() -> None:
    table = ByHand(Bucket(1, 64, 6), Bucket(4, 1, 24, Phase.DECODE))
    assert covering(table, attrs.evolve(LIMITS, max_draft_tokens=3)) == (Bucket(4, 4, 24, Phase.DECODE),)


def test_decodes_read_a_range_of_the_cache_or_three_times_as_much_as_there_is() -> None:
    short = ByHand(Bucket(1, 64, 6), Bucket(4, 1, 4, Phase.DECODE))
    few = attrs.evolve(LIMITS, num_blocks=6)
    assert covering(short, few) == (Bucket(4, 1, 18, Phase.DECODE),)
    assert covering(short, attrs.evolve(few, contiguous=True)) == (Bucket(4, 1, 6, Phase.DECODE),)


limits = st.builds(
    BucketLimits,
    block_size=st.sampled_from([16, 128]),
    max_model_len=st.integers(20, 700),
    max_num_seqs=st.integers(1, 9),
    max_num_batched_tokens=st.integers(16, 900),
    max_prefill_batch_size=st.integers(1, 3),
    num_blocks=st.integers(9, 60),
    contiguous=st.booleans(),
    prefix_caching=st.booleans(),
    max_draft_tokens=st.sampled_from([0, 2]),
)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("strategy", [Exponential, Linear, PaddingAware, Unified])
@settings(max_examples=40, derandomize=True, phases=(Stage.explicit, Stage.generate))
@given(data=st.data())
def test_with_it_every_shape_that_a_step_can_have_is_prepared(strategy, data) -> None:
    bounds = data.draw(limits)
    made = strategy(bounds)
    table = set(made.buckets(bounds))
    extra = covering(made, bounds)
    computed = data.draw(st.integers(0, bounds.max_model_len - 1))
    tokens = data.draw(st.integers(1, min(bounds.max_num_batched_tokens, bounds.max_model_len - computed)))
    batch_size = data.draw(st.integers(1, bounds.max_num_seqs))
    readable = bounds.num_blocks if bounds.contiguous else batch_size * bounds.max_blocks_per_sequence
    num_blocks = data.draw(st.integers(1, min(readable, max(batch_size, 3 * bounds.num_blocks))))
    for shape in (
        Shape(1, tokens, -(-computed // bounds.block_size)),
        Shape(batch_size, 1, num_blocks, Phase.DECODE),
        Shape(batch_size, 1 + bounds.max_draft_tokens, num_blocks, Phase.DECODE),
    ):
        assert made.bucket_for(shape) in table or any(bucket.covers(shape) for bucket in extra)


def test_engine_prepares_it_and_runs_in_it_what_the_table_misses() -> None:
    table = (Bucket(2, 8, 0), Bucket(4, 1, 64, Phase.DECODE))
    backend = FakeBackend(layout="padded", max_model_len=64)
    engine = make_engine(backend=backend, bucketing=ByHand(*table), complete=True, max_num_seqs=4)
    extra = set(engine.warm_up.buckets) - set(table)
    assert {bucket.phase for bucket in extra} == {Phase.PREFILL}
    assert extra <= set(backend.prepared)
    prompts = {"short": tuple(range(1, 6)), "long": tuple(range(1, 40))}
    for name, prompt in prompts.items():
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=5)))
    ended = drain(engine)
    assert {name: one.finish_reason for name, one in ended.items()} == dict.fromkeys(prompts, FinishReason.LENGTH)
    assert {name: one.token_ids.tolist() for name, one in ended.items()} == {
        name: fake_text(prompt, 5) for name, prompt in prompts.items()
    }
    assert (engine.totals.num_unprepared, engine.totals.num_fallbacks > 0) == (0, True)


def test_engine_that_refuses_misses_prepares_the_table_alone() -> None:
    table = (Bucket(4, 8, 0), Bucket(4, 1, 64, Phase.DECODE))
    engine = make_engine(
        backend=FakeBackend(layout="padded"), bucketing=ByHand(*table), complete=True, on_miss="refuse"
    )
    assert engine.warm_up.buckets == table
