"""Layers called one by one, on fewer and fewer tokens."""

from __future__ import annotations

import pytest
import torch

from support.backends import tiny_models
from support.backends.blend_scene import BlendScene, tokens_of
from trencadis.errors import BackendError
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.blend.partial_forward import PartialForward

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
