"""What of a model decides the bytes of its KV."""

from __future__ import annotations

import attrs
import pytest

from trencadis.records import ModelFacts

FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    dtype="float32",
    vocab_size=97,
    max_model_len=128,
    eos_token_ids=(0,),
    num_parameters=1,
    weights_bytes=4,
    kv_bytes_per_token=16,
    fingerprint="abc",
)


@pytest.mark.parametrize(
    "change", [{"architecture": "Qwen3ForCausalLM"}, {"dtype": "bfloat16"}, {"fingerprint": "abd"}, {"fingerprint": ""}]
)
def test_another_model_has_another_identity(change) -> None:
    assert attrs.evolve(FACTS, **change).identity != FACTS.identity


def test_sizes_that_are_no_part_of_the_weights_do_not_count() -> None:
    assert attrs.evolve(FACTS, max_model_len=64, embedding_size=8).identity == FACTS.identity


def test_where_one_part_ends_counts() -> None:
    one, two = (
        attrs.evolve(FACTS, architecture=architecture, dtype=dtype)
        for architecture, dtype in (("ab", "c"), ("a", "bc"))
    )
    assert one.identity != two.identity
