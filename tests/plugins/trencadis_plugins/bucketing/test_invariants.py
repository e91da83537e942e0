"""What holds for every strategy under any limits, and for every shape of the legal box."""

from __future__ import annotations

import logging

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.records import BucketLimits, Phase, Shape
from trencadis_plugins.bucketing.config import ExponentialConfig, FromFileConfig, LinearConfig, UnifiedConfig
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_plugins.bucketing.from_file import FromFile
from trencadis_plugins.bucketing.linear import Linear
from trencadis_plugins.bucketing.padding_aware import PaddingAware
from trencadis_plugins.bucketing.prompt_rules import PromptRules
from trencadis_plugins.bucketing.strategy import padded_cost
from trencadis_plugins.bucketing.unified import Unified

SLICES = PromptRules(slice_queries=True, slice_tokens=12, slice_threshold=20)
STRATEGIES = {
    "exponential": Exponential,
    "exponential_2025": lambda limits: Exponential(limits, ExponentialConfig(generation="2025-07")),
    "exponential_without_clamp": lambda limits: Exponential(limits, ExponentialConfig(clamp_decode_blocks=False)),
    "exponential_in_slices": lambda limits: Exponential(limits, ExponentialConfig(prompts=SLICES)),
    "exponential_for_decoding": lambda limits: Exponential(
        limits, ExponentialConfig(single_token_prompts=True, prompt_ctx_max=5)
    ),
    "exponential_flat": lambda limits: Exponential(limits, ExponentialConfig(flat_drafts=True)),
    "linear": Linear,
    "linear_in_slices": lambda limits: Linear(limits, LinearConfig(prompts=SLICES)),
    "linear_by_hand": lambda limits: Linear(limits, LinearConfig(prompt_ctx_max=4, decode_block_max=64)),
    "padding_aware": PaddingAware,
    "unified": Unified,
    "unified_alpha": lambda limits: Unified(limits, UnifiedConfig(form="alpha")),
    "from_file": None,
}
BUCKETS = "([1, 2, 5], [2, 16, 100], [0, 3])\n([1, 3, 8, 64], 1, [1, 4, 64, 200])\n(1, 300, range(0, 40, 7))\n"


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Thousands of tables are made here, and each would be logged."""
    logger = logging.getLogger("trencadis_plugins")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Make a strategy by its name in STRATEGIES."""
    path = tmp_path_factory.mktemp("buckets") / "buckets.txt"
    path.write_text(BUCKETS)
    listed = FromFileConfig(path=str(path), phases="decode")
    return lambda name, limits: FromFile(limits, listed) if name == "from_file" else STRATEGIES[name](limits)


@st.composite
def any_limits(draw):
    block_size = draw(st.sampled_from([1, 4, 16, 512]))
    seqs = draw(st.integers(1, 24))
    # From 8,192 tokens on, the largest context follows the query length.
    length = st.integers(8192, 9000) if block_size == 512 else st.integers(2, 12 * block_size)
    merged = draw(st.sampled_from([1, 1, 1, 3]))
    return BucketLimits(
        block_size=block_size,
        max_model_len=draw(length),
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(1, 8 * block_size)),
        max_prefill_batch_size=1 if merged > 1 else draw(st.integers(1, min(seqs, 9))),
        num_blocks=draw(st.integers(2, 150)),
        contiguous=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        max_draft_tokens=draw(st.sampled_from([0, 0, 1, 3])),
        max_merged_prefills=min(merged, seqs),
    )


def legal_shape(limits, phase, draw):
    """Return a shape of the legal box; a longest query leaves a token of the budget to each other sequence."""
    budget = limits.max_num_batched_tokens
    if phase is Phase.PREFILL:
        batch_size = draw(st.integers(1, min(limits.max_prefill_batch_size, budget)))
        prompts = limits.max_merged_prefills
        query_len = draw(st.integers(1, min(budget - batch_size + 1, limits.max_prefill_query_len)))
        if prompts > 1:
            return Shape(1, query_len, draw(st.integers(0, limits.max_context_blocks)))
        left = limits.max_model_len - (query_len if batch_size == 1 else 1)
        return Shape(batch_size, query_len, draw(st.integers(0, -(-left // limits.block_size))))
    batch_size = draw(st.integers(1, min(limits.max_num_seqs, budget)))
    query_len = draw(st.integers(1, min(1 + limits.max_draft_tokens, budget - batch_size + 1)))
    most = limits.num_blocks if limits.contiguous else batch_size * limits.max_blocks_per_sequence
    return Shape(batch_size, query_len, draw(st.integers(min(batch_size, most), most)), Phase.DECODE)


@pytest.mark.representatives(4)
@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=12, phases=[Stage.explicit, Stage.generate])
@given(limits=any_limits(), data=st.data())
def test_every_legal_shape_runs_in_the_cheapest_prepared_bucket_or_in_a_fallback_that_covers_it(
    make, name, limits, data
):
    strategy = make(name, limits)
    table = strategy.buckets(limits)
    assert list(table) == sorted(set(table), key=lambda bucket: (bucket.phase is Phase.DECODE, bucket))
    for phase in Phase:
        for _ in range(6):
            shape = legal_shape(limits, phase, data.draw)
            bucket = strategy.bucket_for(shape)
            assert bucket.covers(shape)
            fitting = [candidate for candidate in table if candidate.covers(shape)]
            if fitting:
                assert bucket in fitting
                assert padded_cost(bucket) == min(map(padded_cost, fitting))
            assert strategy.bucket_for(Shape(bucket.batch_size, bucket.query_len, bucket.num_blocks, phase)) == bucket
