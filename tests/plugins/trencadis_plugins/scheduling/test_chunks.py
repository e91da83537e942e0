from __future__ import annotations

import pytest

from trencadis_plugins.scheduling.chunks import Chunks
from trencadis_plugins.scheduling.config import FcfsConfig

PACE = {"tpot_target_ms": 50.0, "step_ms": 10.0, "token_us": 100.0, "context_token_us": 1.0}


def test_step_fills_its_target_exactly(view_of):
    """10 ms + 4 decodes and n prompt tokens at 0.1 ms + 4,000 KV entries at 1 us = 50 ms gives n = 356."""
    view = view_of(running=[0, 1, 2, 3], num_computed_tokens=dict.fromkeys(range(4), 1000))
    chunks = Chunks(FcfsConfig(**PACE))
    budget = chunks.prefill_budget(view, token_budget=2048)
    assert budget == 356
    assert chunks.step_time.step_s(budget + 4, 4000) == pytest.approx(0.050)


def test_target_of_the_call_goes_before_the_configured_one(view_of):
    chunks = Chunks(FcfsConfig(**PACE))
    assert chunks.prefill_budget(view_of(running=[0]), token_budget=2048, target_s=0.0305) == 204


def test_without_decodes_or_a_target_the_whole_budget_is_for_prompts(view_of):
    assert Chunks(FcfsConfig(**PACE)).prefill_budget(view_of(waiting=[0]), token_budget=2048) == 2048
    assert Chunks(FcfsConfig()).prefill_budget(view_of(running=[0]), token_budget=2048) == 2048


def test_prompts_get_a_block_even_where_decodes_alone_miss_the_target(view_of):
    view = view_of(running=[0], num_computed_tokens={0: 10**6}, block_size=16)
    assert Chunks(FcfsConfig(**PACE)).prefill_budget(view, token_budget=2048) == 16
    assert Chunks(FcfsConfig(**PACE)).prefill_budget(view, token_budget=4) == 4


def test_cap_holds_beside_a_target(view_of):
    chunks = Chunks(FcfsConfig(**PACE, max_prefill_tokens=100))
    assert chunks.prefill_budget(view_of(running=[0]), token_budget=2048) == 100


@pytest.mark.parametrize(
    ("num_remaining", "token_budget", "chunk"),
    [(1000, 700, 512), (1000, 512, 512), (300, 700, 300), (1000, 100, 64), (1000, 60, 60), (64, 64, 64)],
)
def test_a_part_of_a_prompt_has_one_of_the_sizes_and_its_end_any(num_remaining, token_budget, chunk):
    chunks = Chunks(FcfsConfig(chunk_sizes=(64, 512, 128)))
    assert chunks.chunk(num_remaining=num_remaining, token_budget=token_budget) == chunk
