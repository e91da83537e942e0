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
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.blend.blender import check_layers, make_blender, pairs_of_layers, shares
from trencadis_torch.blend.packed_tokens import PackedTokens
from trencadis_torch.blend.partial_forward import PartialForward
from trencadis_torch.blend.reposition import Angles, Pairs, Rotary, rotate, unrotate
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

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


@torch.inference_mode()
def test_all_layers_one_by_one_are_the_models_own_forward(scene):
    tokens, walk = tokens_of(0, 12), PartialForward(scene.model)
    walkers = walk.begin(torch.from_numpy(tokens).long(), torch.arange(12))
    expected = scene.exact(tokens)
    for index in range(len(walk)):
        keys, values = walk.look(index, walkers)
        torch.testing.assert_close(keys, expected[index][0], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(values, expected[index][1], atol=1e-4, rtol=1e-5)
        walkers = walk.through(index, walkers, WholeTexts(scene.cache.layers, [12]))


@torch.inference_mode()
def test_tokens_that_are_left_keep_their_positions(scene):
    tokens, walk = tokens_of(0, 12), PartialForward(scene.model)
    walkers = walk.begin(torch.from_numpy(tokens).long(), torch.arange(100, 112))
    kept = torch.tensor([1, 5, 11])
    keys, _ = walk.look(0, walkers.only(kept))
    torch.testing.assert_close(keys, walk.look(0, walkers)[0][kept], atol=1e-5, rtol=1e-5)


def test_looking_leaves_the_model_as_it_was(scene):
    walk = PartialForward(scene.model)
    walk.begin(torch.arange(4), torch.arange(4))
    assert not any(module._forward_pre_hooks for module in scene.model.modules())
    assert len(scene.exact(tokens_of(0, 6))) == len(walk)


def test_model_without_a_list_of_layers_is_refused():
    with pytest.raises(BackendError, match="no list of layers"):
        PartialForward(tiny_models.make_model("gpt2"))


@pytest.fixture
def one():
    return BlendScene(tiny_models.make_model("llama"))


def test_pairs_are_what_two_positions_agree_on(one):
    walk, rotary = PartialForward(one.model), Rotary(one.model)
    assert pairs_of_layers(walk, rotary, torch.device("cpu"), one.cache.layers) == (Pairs.HALVES,) * 3


def test_keys_that_depend_on_the_position_otherwise_are_refused(one, monkeypatch):
    walk, rotary = PartialForward(one.model), Rotary(one.model)
    look = walk.look

    def bent(index, walkers):
        keys, values = look(index, walkers)
        return keys + walkers.arguments["position_ids"][0][:, None, None], values

    monkeypatch.setattr(walk, "look", bent)
    with pytest.raises(BackendError, match="in a way that is not known here"):
        pairs_of_layers(walk, rotary, torch.device("cpu"), one.cache.layers)


def test_model_that_does_something_between_its_layers_is_refused(one):
    one.model.base_model.layers[1].register_forward_pre_hook(
        lambda _, args: (args[0] + 1.0,) if next(calls, False) else None
    )
    calls = iter([True])  # the whole forward comes first: only that one is changed
    with pytest.raises(BackendError, match="do not give what the model gives"):
        check_layers(one.model, PartialForward(one.model), one.cache.layers)


def test_backend_that_was_not_given_a_way_to_blend_has_none(one):
    assert one.cache.blender() is None
    one.cache.make_blender = lambda cache: make_blender(one.model, cache)
    assert one.cache.blender().token_bytes == one.blender.token_bytes


def made(dtype, value_dim=6):
    layers = tuple(
        AttentionLayer(index=i, num_kv_heads=2, key_dim=8, value_dim=value_dim, window=0, dtype=dtype) for i in range(2)
    )
    cache = PagedKVCache(layers, num_blocks=8, block_size=4, device=torch.device("cpu"))
    return cache, PackedTokens(layers, (Pairs.HALVES, Pairs.NONE), block_size=4)


def angles(first, count):
    turns = torch.arange(first, first + count)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    return Angles(turns.repeat(1, 2).cos(), turns.repeat(1, 2).sin())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_packed_comes_back_turned_as_it_was(dtype):
    """Keys in float32, so that turning them back and forth costs no more than its rounding; values bit for bit."""
    cache, packed = made(dtype)
    for part in cache.parts:
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    blocks = np.empty((3, cache.layout.block_bytes), np.uint8)
    cache.read_blocks([5, 0, 3], blocks)
    tokens = packed.pack(blocks, skip=3, num_tokens=7, angles=angles(40, 7))
    assert tokens.shape == (7, packed.token_bytes)
    slots = (torch.tensor([5, 0, 3])[:, None] * 4 + torch.arange(4)).flatten()[3:10]
    for place, pairs in enumerate((Pairs.HALVES, Pairs.NONE)):
        keys = rotate(packed.keys(tokens, place), angles(40, 7), pairs)
        original = cache.keys[place].flatten(0, 1)[slots].float()
        torch.testing.assert_close(keys, original, atol=1e-6, rtol=1e-6)
        assert torch.equal(packed.values(tokens, place), cache.values[place].flatten(0, 1)[slots])


def test_a_part_of_the_tokens_is_a_part_of_the_bytes():
    cache, packed = made(torch.float32)
    for part in cache.parts:
        part.copy_(torch.randn(part.shape))
    blocks = np.empty((2, cache.layout.block_bytes), np.uint8)
    cache.read_blocks([1, 2], blocks)
    whole = packed.pack(blocks, skip=0, num_tokens=8, angles=angles(0, 8))
    assert (whole[3:6] == packed.pack(blocks, skip=3, num_tokens=3, angles=angles(3, 3))).all()


def test_bytes_of_a_token_are_keys_in_float32_and_values_as_they_are():
    _, packed = made(torch.bfloat16)
    assert packed.token_bytes == 2 * 2 * 8 * 4 + 2 * 2 * 6 * 2


SMALL = {name: value for name, value in tiny_models._COMMON.items() if name != "max_position_embeddings"}
FAR = 91_234


def model(config):
    torch.manual_seed(1)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


ROPES = {
    "default": rope("default"),
    "linear": rope("linear", factor=4.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
    "yarn": rope("yarn", factor=16.0, original_max_position_embeddings=8192),
}


def llama_of(kind):
    return model(hf.LlamaConfig(**SMALL, max_position_embeddings=131072, rope_parameters=ROPES[kind]))


@pytest.mark.parametrize("pairs", list(Pairs))
def test_rotating_back_gives_the_key(pairs):
    positions = torch.tensor([0, 5, FAR])
    angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.01])
    two = (angles.repeat(1, 2) if pairs is Pairs.HALVES else angles.repeat_interleave(2, 1)).double()
    turn = Angles(1.3 * two.cos(), 1.3 * two.sin())
    keys = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(unrotate(rotate(keys, turn, pairs), turn, pairs), keys)
    if pairs is not Pairs.NONE:
        assert not torch.allclose(rotate(keys, turn, pairs)[1], keys[1])
        torch.testing.assert_close(rotate(keys, turn, pairs)[..., 6:], keys[..., 6:]), "what is not turned stays"


@pytest.mark.parametrize("kind", ROPES)
def test_key_moved_far_is_what_the_model_makes_there(kind):
    """Up to 1e-5 of the largest, in float32, from position 7 to 91,234, for every rope whose angles depend on the position alone."""
    scene = BlendScene(llama_of(kind))
    tokens = tokens_of(0, 12)
    near, far = scene.exact(tokens, position=7)[0][0], scene.exact(tokens, position=FAR)[0][0]
    rotary = Rotary(scene.model)
    plain = unrotate(near, rotary.angles(torch.arange(7, 19)), Pairs.HALVES)
    moved = rotate(plain, rotary.angles(torch.arange(FAR, FAR + 12)), Pairs.HALVES)
    assert float((moved - far).abs().max() / far.abs().max()) < 1e-5
    assert float((near - far).abs().max() / far.abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["cohere", "glm", "smollm3"])
def test_neighbours_parts_and_layers_without_positions_are_found(kind):
    """Cohere turns neighbours, GLM the first half of neighbours, SmolLM3 has layers without positions."""
    configs = {
        "cohere": lambda: hf.CohereConfig(**SMALL, max_position_embeddings=256),
        "glm": lambda: hf.GlmConfig(**SMALL, max_position_embeddings=256, partial_rotary_factor=0.5),
        "smollm3": lambda: hf.SmolLM3Config(**SMALL, max_position_embeddings=256, no_rope_layers=[1, 0, 1]),
    }
    scene = BlendScene(model(configs[kind]()))
    first = Pairs.HALVES if kind == "smollm3" else Pairs.NEIGHBOURS
    assert scene.blender._pairs == (first, Pairs.NONE if kind == "smollm3" else first, first)
    tokens, blocks = tokens_of(0, 24), [3, 1, 4, 0, 5, 9]
    scene.blend(tokens, blocks, [(8, scene.packed(tokens[8:20], position=2))], ratio=0.0)
    assert error(scene.held(blocks)[:1], scene.exact(tokens)[:1]) < 1e-5


def test_ropes_that_change_with_the_length_are_refused():
    config = hf.LlamaConfig(**SMALL, max_position_embeddings=256, rope_parameters=rope("dynamic", factor=2.0))
    with pytest.raises(BackendError, match=r'rope_type "dynamic"'):
        Rotary(model(config))


def test_model_without_a_rotary_module_is_refused():
    with pytest.raises(BackendError, match="no rotary module"):
        Rotary(tiny_models.make_model("gpt2"))
