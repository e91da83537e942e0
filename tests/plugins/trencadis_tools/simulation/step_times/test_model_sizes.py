"""Sizes of models from the configurations of several families."""

from __future__ import annotations

import json

import pytest

from trencadis.errors import ConfigError
from trencadis_tools.simulation.step_times import read_model_sizes

LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}


@pytest.fixture
def sizes(tmp_path):
    def read(**config):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
        return read_model_sizes(str(tmp_path))

    return read


def test_what_llama_leaves_out_follows_from_the_rest(sizes):
    found = sizes()
    assert (found.num_kv_heads, found.head_size, found.num_experts, found.is_mixed) == (4, 16, 0, False)
    assert found.attention_weights == 4 * 64 * 64


def test_heads_may_be_wider_than_the_hidden_size(sizes):
    found = sizes(head_dim=32, num_key_value_heads=2)
    assert found.attention_weights == 2 * 64 * 32 * (4 + 2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (6, 8, 2, 128, 0)),
        ({"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}, (6, 16, 4, 32, 0)),
        ({"num_experts": 16, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, (2, 16, 1, 128, 0)),
        (
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "first_k_dense_replace": 1,
                "n_shared_experts": 2,
            },
            (5, 8, 2, 8, 16),
        ),
    ],
    ids=["mixtral", "qwen", "qwen_some_layers", "deepseek"],
)
def test_experts_are_those_of_the_family(sizes, config, expected):
    found = sizes(**config)
    of = (found.num_expert_layers, found.num_experts, found.num_routes, found.expert_size, found.shared_expert_size)
    assert of == expected
    assert found.is_mixed == (expected[0] < 6)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "float32"}, ("float32", 4.0, 4.0)),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, ("float8", 1.0, 2.0)),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "awq", "bits": 4}}, ("bfloat16", 0.5, 2.0)),
    ],
)
def test_types_are_those_of_weights_and_of_activations(sizes, config, expected):
    found = sizes(**config)
    assert (found.dtype, found.weight_bytes, found.activation_bytes) == expected


def test_text_models_of_multimodal_ones_and_the_demo_are_read(sizes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    assert read_model_sizes(str(tmp_path / "config.json")) == sizes()
    assert read_model_sizes("demo").num_layers > 0


def test_models_of_the_list_have_the_parameters_that_they_are_called_by():
    model = read_model_sizes("llama_3_1_8b")
    num_weights = model.num_layers * (model.attention_weights + 3 * model.hidden_size * model.ffn_size)
    assert num_weights + 2 * 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)


def test_a_configuration_without_a_size_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        read_model_sizes(str(tmp_path))


def test_a_model_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="nowhere") as caught:
        read_model_sizes("nowhere")
    assert "llama_3_1_8b" in str(caught.value.hint)
