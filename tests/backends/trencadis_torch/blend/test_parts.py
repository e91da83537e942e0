"""Layers called one by one, on fewer and fewer tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.backends import tiny_models
from support.backends.blend_scene import BlendScene, tokens_of
from trencadis.errors import BackendError
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.blend.blender import check_layers, make_blender, pairs_of_layers
from trencadis_torch.blend.packed_tokens import PackedTokens
from trencadis_torch.blend.partial_forward import PartialForward
from trencadis_torch.blend.reposition import Angles, Pairs, Rotary, rotate
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

KINDS = ("llama", "qwen3", "gpt_neox", "qwen3_moe")


@pytest.fixture(scope="module", params=KINDS)
def scene(request):
    return BlendScene(tiny_models.make_model(request.param))


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
def llama():
    return BlendScene(tiny_models.make_model("llama"))


def test_pairs_are_what_two_positions_agree_on(llama):
    walk, rotary = PartialForward(llama.model), Rotary(llama.model)
    assert pairs_of_layers(walk, rotary, torch.device("cpu"), llama.cache.layers) == (Pairs.HALVES,) * 3


def test_keys_that_depend_on_the_position_otherwise_are_refused(llama, monkeypatch):
    walk, rotary = PartialForward(llama.model), Rotary(llama.model)
    look = walk.look

    def bent(index, walkers):
        keys, values = look(index, walkers)
        return keys + walkers.arguments["position_ids"][0][:, None, None], values

    monkeypatch.setattr(walk, "look", bent)
    with pytest.raises(BackendError, match="in a way that is not known here"):
        pairs_of_layers(walk, rotary, torch.device("cpu"), llama.cache.layers)


def test_model_that_does_something_between_its_layers_is_refused(llama):
    llama.model.base_model.layers[1].register_forward_pre_hook(
        lambda _, args: (args[0] + 1.0,) if next(calls, False) else None
    )
    calls = iter([True])  # the whole forward comes first: only that one is changed
    with pytest.raises(BackendError, match="do not give what the model gives"):
        check_layers(llama.model, PartialForward(llama.model), llama.cache.layers)


def test_backend_that_was_not_given_a_way_to_blend_has_none(llama):
    assert llama.cache.blender() is None
    llama.cache.make_blender = lambda cache: make_blender(llama.model, cache)
    assert llama.cache.blender().token_bytes == llama.blender.token_bytes


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
