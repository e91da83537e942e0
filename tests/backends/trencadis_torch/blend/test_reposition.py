"""A key's position taken out and put in is the key at that position, however the model rotates."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from support.backends import tiny_models
from support.backends.blend_scene import BlendScene, error, tokens_of
from trencadis.errors import BackendError
from trencadis_torch.blend.reposition import Angles, Pairs, Rotary, rotate, unrotate

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


def llama(kind):
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
    scene = BlendScene(llama(kind))
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
