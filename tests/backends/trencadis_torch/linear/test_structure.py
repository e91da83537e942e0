"""Which families run in one call, and that they compute what transformers computes; structures of published checkpoints among them."""

from __future__ import annotations

import pytest
import torch

from support.backends import families
from support.backends.one_call import errors_in_one_call
from trencadis_torch.linear.decoder import decoder_of
from trencadis_torch.linear.heads import How
from trencadis_torch.linear.native import native
from trencadis_torch.linear.structure import Ending, Order, OtherwiseError, read_ending, scale_between

pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")

MIXED = ["sliding_attention", "full_attention"]
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16384,
}
PUBLISHED = {
    "head size is not hidden size by heads": ("llama", {"head_dim": 20}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied embeddings": ("gemma3_text", {"tie_word_embeddings": True}),
    "local and global angles": ("gemma3_text", {"layer_types": MIXED, "sliding_window": 6}),
    "half of each head turned": (
        "glm4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "partly turned halves": (
        "phi",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "global layers without rotation": ("cohere2", {"layer_types": MIXED, "sliding_window": 6, "logit_scale": 0.25}),
    "some layers without rotation": ("smollm3", {"no_rope_layers": [1, 0]}),
    "windows and norms of heads": ("exaone4", {"layer_types": MIXED, "sliding_window": 6}),
    "multipliers": (
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 0.1},
    ),
    "long texts": ("olmo3", {"layer_types": MIXED, "sliding_window": 6}),
    "scaled angles": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "soft caps": (
        "gemma2",
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 30},
    ),
    "heads between each other, half of each turned": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "heads between each other, one sum after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "angles of Llama 3.1": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "norms of heads, biases, half of each turned": (
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "a mixture with multipliers": (
        "granitemoe",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0, "attention_multiplier": 0.1},
    ),
    "queries scaled by their positions": (
        "ministral3",
        {"rope_parameters": {**MINISTRAL, "original_max_position_embeddings": 8}},
    ),
    "squared relu": ("jais2", {"hidden_act": "relu2"}),
    "exact gelu": ("starcoder2", {"hidden_act": "gelu"}),
}


@pytest.mark.representatives(6)
@pytest.mark.parametrize("kind", families.SERVED)
def test_families_run_in_one_call_or_say_why_not(kind):
    found = errors_in_one_call(families.make_family(kind))
    if kind in families.IN_ONE_CALL:
        assert found < 3e-5
    else:
        assert found.startswith("layer by layer: ")


@pytest.mark.representatives(4)
@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_structures_of_published_checkpoints_run_in_one_call(name, layout):
    kind, changes = PUBLISHED[name]
    assert errors_in_one_call(families.make_family(kind, **changes), layout=layout) < 3e-5


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("olmo", {"clip_qkv": 3.0}, "its attention is its own in 2 of 2 layers"),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 6,
                    "long_factor": [2.0] * 6,
                    "original_max_position_embeddings": 64,
                },
                "original_max_position_embeddings": 64,
            },
            "its angles are longrope: other ones once a text is long",
        ),
    ],
    ids=["a limit that few tokens meet", "angles that move"],
)
def test_what_a_few_tokens_do_not_show_is_found_all_the_same(kind, changes, reason):
    """Without larger inputs, and positions that are far, each would run in one call and be wrong on other texts."""
    assert errors_in_one_call(families.make_family(kind, **changes)) == f"layer by layer: {reason}"


def read(kind, **changes):
    model = families.make_family(kind, **changes)
    assert errors_in_one_call(model) < 3e-5
    return decoder_of(model)


def test_places_of_norms_and_sums_are_read_off_what_was_seen():
    places = ("attention_norm", "attended_norm", "mlp_norm", "projected_norm")
    expected = {
        "llama": ((1, 0, 1, 0), Order.SEQUENTIAL),
        "olmo2": ((0, 1, 0, 1), Order.SEQUENTIAL),
        "glm4": ((1, 1, 1, 1), Order.SEQUENTIAL),
        "cohere2": ((1, 0, 1, 0), Order.PARALLEL),
        "phi": ((1, 0, 1, 0), Order.PARALLEL_FIRST),
    }
    for kind, (norms, order) in expected.items():
        layer = read(kind).structure.layers[0]
        assert tuple(bool(getattr(layer, name).weight) for name in places) == norms, kind
        assert layer.order == order, kind


def test_ways_of_turning_are_read_off_what_was_handed_to_attention():
    assert How(read("olmo2").structure.layers[0].how) == How.NORMS_WHOLE
    assert How(read("hunyuan_v1_dense").structure.layers[0].how) == How.NORMS_AFTER
    assert How(read("cohere").structure.layers[0].how) == How.PAIRS
    layers = read("smollm3", no_rope_layers=[1, 0]).structure.layers
    assert (layers[0].angles, layers[1].angles) == (0, -1)
    found = read("gemma3_text", layer_types=MIXED, sliding_window=6)
    assert [found.structure.layers[i].angles for i in range(2)] == [0, 1]
    assert len(found.angles) == 2


def test_scales_of_queries_are_those_of_far_positions_though_no_token_of_the_trial_has_one():
    (angles,) = read("ministral3", rope_parameters=MINISTRAL).angles
    positions = torch.tensor([0, 16383, 16384, 40000, 262143])
    expected = 1 + 0.1 * torch.log(1 + torch.floor(positions / 16384))
    assert expected[0] == expected[1] < expected[2]
    assert torch.equal(angles.scales(positions), expected)
    assert read("llama").angles[0].scales is None


def test_multipliers_are_those_of_the_configuration():
    found = read("granite", embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0)
    assert found.structure.embedding_scale == 12.0
    assert (found.structure.layers[0].attended_scale, found.structure.layers[0].projected_scale) == (0.22, 0.22)
    assert found.ending in (Ending(divisor=8.0), Ending(factor=0.125))


def test_a_multiplier_is_a_number_that_gives_the_same_bits_or_is_solved_for():
    x = torch.randn(40, generator=torch.Generator().manual_seed(3))
    assert scale_between(x, x, ()) == 1.0
    assert scale_between(x, x * 0.22, (0.22, 12.0)) == 0.22
    assert scale_between(x, x / 16, (16.0,)) == 1 / 16
    assert scale_between(x, x * 0.3137, ()) == pytest.approx(0.3137, rel=1e-5)
    assert scale_between(x, x + 1, ()) is None


def test_an_ending_that_is_not_known_is_refused():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    assert read_ending(x, x, ()) == Ending()
    assert read_ending(x, (x / 5).tanh() * 5, (2.0, 5.0)) == Ending(softcap=5.0)
    with pytest.raises(OtherwiseError, match="its logits are not those"):
        read_ending(x, x.square(), (2.0,))
