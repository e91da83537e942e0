"""Counts of weights and the limits that follow from them, worked out by hand."""

from __future__ import annotations

import pytest

from peers.shapes import SHAPES, Ceilings, decode_limit_s, prefill_limit_s

TINY = SHAPES["tiny"]
SLOW_MEMORY = Ceilings(read=1e9, multiply=1e12)
SLOW_MULTIPLY = Ceilings(read=1e12, multiply=1e9)


def test_weights_are_those_of_the_linear_maps_and_the_shared_embedding() -> None:
    assert TINY.num_layer_weights == 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 192)
    assert TINY.num_weights == TINY.num_layer_weights + 64 * 4096
    assert TINY.kv_bytes_per_token == 2 * 2 * 1 * 32 * 4


@pytest.mark.parametrize(
    ("name", "millions"),
    [("llama-110m", 109.5), ("qwen3-0.5b", 507.5), ("smollm2-135m", 134.5), ("gemma3-270m", 268.0)],
)
def test_the_models_are_as_large_as_their_names_say(name: str, millions: float) -> None:
    assert SHAPES[name].num_weights / 1e6 == pytest.approx(millions, abs=0.1)


def test_decoding_reads_all_weights_and_a_cache_that_grows_or_is_bound_by_the_multipliers() -> None:
    one = {"num_sequences": 1, "context_len": 10}
    limit_s = decode_limit_s(TINY, SLOW_MEMORY, weight_bytes=4, num_steps=2, **one)
    assert limit_s == pytest.approx((2 * 4 * TINY.num_weights + (10 + 11) * 512) / 1e9)
    limit_s = decode_limit_s(TINY, SLOW_MEMORY, weight_bytes=1, num_steps=1, **one)
    assert limit_s == pytest.approx((TINY.num_weights + 10 * 512) / 1e9)
    limit_s = decode_limit_s(TINY, SLOW_MULTIPLY, weight_bytes=4, num_sequences=32, context_len=1, num_steps=1)
    assert limit_s == pytest.approx(2 * 32 * TINY.num_weights / 1e9 + 32 * 512 / 1e12)


def test_prefill_multiplies_layers_for_all_tokens_and_the_head_for_the_last() -> None:
    limit_s = prefill_limit_s(TINY, SLOW_MULTIPLY, weight_bytes=4, num_sequences=2, prompt_len=3)
    linear = 2 * (6 * TINY.num_layer_weights + 2 * 64 * 4096)
    attention = (
        2 * 2 * (2 * 32) * 2 * (1 + 2 + 3) * 2
    )  # products, operations, heads · head_dim, sequences, pairs, layers
    assert limit_s == pytest.approx((linear + attention) / 1e9)
