"""Blended KV against the model's own: equal where it must be, and nearer the more is computed anew."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers as hf

from support.backends import tiny_models
from support.backends.blend_scene import BlendScene, error, mean_error, tokens_of
from trencadis.errors import BackendError
from trencadis_torch.blend.blender import shares

KINDS = ("llama", "qwen3", "gpt_neox", "qwen3_moe")
BLOCKS = [9, 2, 7, 30, 1, 14, 22, 5, 18, 40]


@pytest.fixture(scope="module", params=KINDS)
def scene(request):
    return BlendScene(tiny_models.make_model(request.param))


@pytest.fixture(scope="module")
def llama():
    return BlendScene(tiny_models.make_model("llama"))


@pytest.fixture(scope="module")
def deep():
    """Six layers: enough for those that are left out early to matter later."""
    torch.manual_seed(11)
    config = hf.LlamaConfig(**{**tiny_models._COMMON, "num_hidden_layers": 6})
    return BlendScene(hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


def two_chunks(scene, seed=0, ratio=0.0, forced=()):
    """Blend 40 tokens: 14 of their own, a chunk from position 3, two of their own, a chunk from position 50, four of their own."""
    tokens = tokens_of(seed, 40)
    chunks = [(14, scene.packed(tokens[14:24], position=3)), (26, scene.packed(tokens[26:36], position=50))]
    scene.blend(tokens, BLOCKS, chunks, ratio=ratio, forced=forced)
    return scene.held(BLOCKS), scene.exact(tokens)


def test_everything_computed_anew_is_the_models_own_kv(scene):
    found, expected = two_chunks(scene, ratio=1.0)
    assert error(found, expected) < 1e-5


def test_cache_of_16_bits_is_blended_within_its_rounding():
    """Chunks at their own places, and a few tokens computed anew over them."""
    scene = BlendScene(tiny_models.make_model("llama"), kv_dtype="float16")
    tokens = tokens_of(1, 40)
    scene.blend(tokens, BLOCKS, [(0, scene.packed(tokens))], ratio=0.2)
    assert error(scene.held(BLOCKS), scene.exact(tokens)) < 5e-3


def test_cache_of_int8_is_not_blended():
    with pytest.raises(BackendError, match="int8") as caught:
        BlendScene(tiny_models.make_model("llama"), kv_dtype="int8")
    assert "kv_dtype" in caught.value.hint


def test_without_chunks_everything_is_computed_anew_and_a_chunk_at_its_own_place_is_a_prefix_hit(scene):
    tokens = tokens_of(5, 40)
    for chunks in ([], [(0, scene.packed(tokens))]):
        scene.blend(tokens, BLOCKS, chunks, ratio=0.0)
        assert error(scene.held(BLOCKS), scene.exact(tokens)) < 1e-5


def test_first_layer_depends_on_positions_alone_and_the_second_is_computed_for_all(scene):
    found, expected = two_chunks(scene, seed=2)
    assert error(found[:2], expected[:2]) < 1e-5
    assert error(found[2:], expected[2:]) > 1e-3, "the last layer should not be: else this test shows nothing"


def test_forced_tokens_go_all_the_way(llama):
    """Theirs differ from the exact ones only by what the others gave them; those of the others are the chunks'."""
    tokens = tokens_of(3, 40)
    part = llama.packed(tokens[16:32], position=5)
    alone = llama.exact(tokens[16:32], position=16)[2]
    llama.blend(tokens, BLOCKS, [(16, part)], ratio=0.0, forced=(18, 19))
    keys, values = llama.held(BLOCKS)[2]
    others = [i for i in range(16) if i not in (2, 3)]
    for found, expected in ((keys, alone[0]), (values, alone[1])):
        difference = (found[16:32] - expected).abs().amax((1, 2)) / expected.abs().max()
        assert difference[others].max() < 1e-5
        assert difference[[2, 3]].min() > 1e-3


@pytest.mark.nightly  # that computing some tokens anew helps: below
def test_error_falls_with_the_ratio_on_average(deep):
    """Over ten texts; a single one may get worse by chance."""
    ratios = (0.0, 0.1, 0.2, 0.4, 0.6, 1.0)
    means = [np.mean([mean_error(*two_chunks(deep, seed=seed, ratio=ratio)) for seed in range(10)]) for ratio in ratios]
    assert all(later < earlier for earlier, later in itertools.pairwise(means)), means
    assert means[0] > 0.05
    assert means[-1] < 1e-5


def test_tokens_that_differ_most_are_better_than_those_that_differ_least(deep, monkeypatch):
    """The ranking is worth something, on average over ten texts."""
    ranked = np.mean([mean_error(*two_chunks(deep, seed=seed, ratio=0.2)) for seed in range(10)])
    monkeypatch.setattr(
        "trencadis_torch.blend.blender._change", lambda new, old: -(new - old).float().square().sum((1, 2))
    )
    assert np.mean([mean_error(*two_chunks(deep, seed=seed, ratio=0.2)) for seed in range(10)]) > 1.03 * ranked


def test_exact_tokens_in_front_are_read_and_not_written(scene):
    tokens = tokens_of(4, 40)
    scene.put(tokens[:12], BLOCKS[:3])
    before = scene.held(BLOCKS[:3])
    scene.blend(tokens, BLOCKS, [(16, scene.packed(tokens[16:30], position=1))], ratio=1.0, num_exact=12)
    assert error(scene.held(BLOCKS), scene.exact(tokens)) < 1e-5
    assert all(
        torch.equal(a, b)
        for x, y in zip(before, scene.held(BLOCKS[:3]), strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_other_blocks_are_not_touched_and_work_can_be_dropped_anywhere(llama):
    others = [block for block in range(64) if block not in BLOCKS]
    before = llama.held(others)
    two_chunks(llama, ratio=0.3)
    assert error(llama.held(others), before) == 0.0
    tokens = tokens_of(6, 40)
    assert llama.blend(tokens, BLOCKS, [], ratio=1.0) == 3, "one part for each layer"


def test_half_precision_is_rounded_once_more_and_no_worse():
    """bfloat16 keeps 8 bits: a chunk moved is as near to the model's own keys of the first layer as their rounding."""
    scene = BlendScene(tiny_models.make_model("llama", dtype=torch.bfloat16))
    found, expected = two_chunks(scene, seed=2)
    assert error(found[:1], expected[:1]) < 2**-6
    found, expected = two_chunks(scene, seed=2, ratio=1.0)
    assert mean_error(found, expected) < 0.02


def test_pieces_of_the_attention_meet_without_a_seam(llama, monkeypatch):
    monkeypatch.setattr("trencadis_torch.blend.blender.MAX_PIECE", 3)
    found, expected = two_chunks(llama, ratio=1.0)
    assert error(found, expected) < 1e-5


def test_fewer_go_on_from_layer_to_layer():
    assert shares(0.2, 8) == {1: pytest.approx(0.3), 2: pytest.approx(0.25), 3: 0.2, 7: 0.2}
    assert shares(0.9, 3) == {1: 1.0, 2: 0.9}
    assert shares(0.5, 1) == {0: 0.5}


@pytest.mark.parametrize("kind", ["gemma3", "phi3", "gpt2"])
def test_models_it_does_not_know_are_refused_in_words(kind):
    with pytest.raises(BackendError, match=r"sliding window|no list of layers"):
        BlendScene(tiny_models.make_model(kind))
