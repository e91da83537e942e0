"""Engines share KV blocks exactly if they run the same model."""

from __future__ import annotations

import attrs
import pytest

from trencadis.config.schema import Config, ModelConfig
from trencadis.engine.cache.hashing import compatibility_of
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


def of(path="/models/a", *, revision="", block_size=16, **facts) -> str:
    config = Config(model=ModelConfig(path=path, revision=revision))
    return compatibility_of(config, attrs.evolve(FACTS, **facts), block_size)


def test_same_files_at_another_path_are_the_same_model() -> None:
    assert of("/models/a") == of("/mnt/copy", revision="main")


@pytest.mark.parametrize("change", [{"fingerprint": "abd"}, {"dtype": "bfloat16"}, {"architecture": "Qwen3"}])
def test_another_model_at_the_same_path_is_another(change) -> None:
    assert of(**change) != of()


def test_block_size_counts() -> None:
    assert of(block_size=32) != of()


def test_without_a_fingerprint_path_and_revision_stand_for_the_model() -> None:
    assert of("/models/a", fingerprint="") != of("/models/b", fingerprint="")
    assert of(revision="a", fingerprint="") != of(revision="b", fingerprint="")
    assert of(fingerprint="") != of()
