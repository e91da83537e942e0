"""Models that cannot be blended say why, before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from support.backends import tiny_models
from support.backends.blend_scene import BlendScene
from trencadis.errors import BackendError
from trencadis_torch.blend.blender import check_layers, make_blender, pairs_of_layers
from trencadis_torch.blend.partial_forward import PartialForward
from trencadis_torch.blend.reposition import Pairs, Rotary


@pytest.fixture
def scene():
    return BlendScene(tiny_models.make_model("llama"))


def test_pairs_are_what_two_positions_agree_on(scene):
    walk, rotary = PartialForward(scene.model), Rotary(scene.model)
    assert pairs_of_layers(walk, rotary, torch.device("cpu"), scene.cache.layers) == (Pairs.HALVES,) * 3


def test_keys_that_depend_on_the_position_otherwise_are_refused(scene, monkeypatch):
    walk, rotary = PartialForward(scene.model), Rotary(scene.model)
    look = walk.look

    def bent(index, walkers):
        keys, values = look(index, walkers)
        return keys + walkers.arguments["position_ids"][0][:, None, None], values

    monkeypatch.setattr(walk, "look", bent)
    with pytest.raises(BackendError, match="in a way that is not known here"):
        pairs_of_layers(walk, rotary, torch.device("cpu"), scene.cache.layers)


def test_model_that_does_something_between_its_layers_is_refused(scene):
    scene.model.base_model.layers[1].register_forward_pre_hook(
        lambda _, args: (args[0] + 1.0,) if next(calls, False) else None
    )
    calls = iter([True])  # the whole forward comes first: only that one is changed
    with pytest.raises(BackendError, match="do not give what the model gives"):
        check_layers(scene.model, PartialForward(scene.model), scene.cache.layers)


def test_backend_that_was_not_given_a_way_to_blend_has_none(scene):
    assert scene.cache.blender() is None
    scene.cache.make_blender = lambda cache: make_blender(scene.model, cache)
    assert scene.cache.blender().token_bytes == scene.blender.token_bytes
