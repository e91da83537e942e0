"""Whole engines whose passes hold prefills and decodes in one row, or prompts in one row: fake backends check every bucket."""

from __future__ import annotations

import random
from typing import Any

import pytest

from trencadis.interfaces import BucketingStrategy, PendingStep
from trencadis.records import Batch, Bucket, BucketLimits, Request, SamplingParams, UnifiedBucket
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_plugins.bucketing.unified import Unified
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text

SYSTEM_PROMPT = tuple(range(1, 14))
LIMITS = BucketLimits(
    block_size=4,
    max_model_len=256,
    max_num_seqs=6,
    max_num_batched_tokens=48,
    max_prefill_batch_size=6,
    num_blocks=64,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
    unified=True,
)


class Recorder(FakeExecutor):
    """Keeps the buckets of all passes."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend)
        self.batches: list[list[Bucket]] = []

    def submit(self, batch: Batch) -> PendingStep:
        self.batches.append([one.bucket for one in batch.passes])
        return super().submit(batch)


def prompts(count: int = 14) -> dict[str, tuple[int, ...]]:
    """Short and long ones; most begin with the same blocks."""
    rng = random.Random(7)
    tails = {str(i): tuple(rng.randrange(1, 97) for _ in range(rng.choice((1, 3, 8, 40, 70)))) for i in range(count)}
    return {name: (SYSTEM_PROMPT + tail if int(name) % 3 else tail) for name, tail in tails.items()}


def serve(engine: Any, asked: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """One request a step, so that prefills and decodes meet."""
    ended = {}
    for name, prompt in asked.items():
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=9)))
        ended.update((end.request_id, end) for end in engine.step().finished)
    ended |= drain(engine)
    return {name: ended[name].token_ids.tolist() for name in asked}


def expected(asked: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    return {name: fake_text(prompt, 9, eos=-1) for name, prompt in asked.items()}


def engine_of(layout: str, bucketing: BucketingStrategy | None = None, **options: Any) -> tuple[Any, Recorder]:
    backend = FakeBackend(
        layout=layout, max_model_len=256, eos=-1, max_prefill_batch_size=3, merges_prefills=layout == "padded"
    )
    executor = Recorder(backend)
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 48, **options}
    return make_engine(executor=executor, bucketing=bucketing, **sizes), executor


def test_unified_passes_share_what_their_sequences_have_in_common() -> None:
    engine, executor = engine_of("unified")
    serve(engine, prompts())
    buckets = [bucket for batch in executor.batches for bucket in batch]
    assert all(type(bucket) is UnifiedBucket for bucket in buckets)
    assert any(not bucket.is_causal and bucket.num_blocks >= 3 for bucket in buckets)
    assert any(bucket.is_causal and bucket.num_unique_blocks for bucket in buckets)


def test_merged_passes_hold_several_prompts_and_their_context() -> None:
    backend = FakeBackend(layout="padded", max_model_len=256, eos=-1, max_prefill_batch_size=3, merges_prefills=True)
    executor = Recorder(backend)
    engine = make_engine(executor=executor, max_num_seqs=6, max_num_batched_tokens=48)
    assert serve(engine, {"0": SYSTEM_PROMPT}) == expected({"0": SYSTEM_PROMPT})
    asked = {str(i): (*SYSTEM_PROMPT, 20 + i, 30 + i) for i in range(1, 4)}
    for name, prompt in asked.items():
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=9)))
    executor.batches.clear()
    assert {name: end.token_ids.tolist() for name, end in drain(engine).items()} == expected(asked)
    assert executor.batches[0] == [Bucket(1, 9, 9)]  # of each, three cached blocks and three tokens more


@pytest.mark.parametrize("form", ["exponential", "alpha"])
def test_after_the_warm_up_no_unified_pass_is_in_a_bucket_that_was_not_prepared(form: str) -> None:
    from trencadis_plugins.bucketing.config import UnifiedConfig

    bucketing = Unified(LIMITS, UnifiedConfig(form=form))
    engine, executor = engine_of("unified", bucketing, on_miss="refuse")
    assert serve(engine, prompts()) == expected(prompts())
    prepared = set(executor.backend.prepared)
    assert prepared == set(bucketing.buckets(LIMITS))
    assert {bucket for batch in executor.batches for bucket in batch} <= prepared
    assert engine.totals.num_failed_steps == 0


def test_strategy_that_knows_no_unified_shapes_is_replaced_by_its_fallback() -> None:
    engine, _ = engine_of("unified", Exponential(LIMITS), warmup=False, fallback=True)
    assert serve(engine, prompts(4)) == expected(prompts(4))


def test_blocks_of_a_unified_backend_are_kept_at_low_ids() -> None:
    """Unique blocks are read as one range, so the defragmenter is on by default."""
    engine, _ = engine_of("unified")
    assert engine.stage("defragmenter").after_plan in engine._stages.after_plan
    with pytest.raises(KeyError):
        engine_of("padded")[0].stage("defragmenter")
