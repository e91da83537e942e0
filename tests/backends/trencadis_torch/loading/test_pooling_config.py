from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from support.backends import tiny_encoders
from support.backends.tiny_encoders import write_json, write_modules
from trencadis.errors import ModelLoadError
from trencadis.records import ModelSource
from trencadis_torch.loading.loader import find_model
from trencadis_torch.loading.pooling_config import PoolingConfig, read_pooling_config

CPU = torch.device("cpu")
HIDDEN = torch.tensor([[3.0, 4.0], [1.0, 0.0], [3.0, 2.0], [5.0, 10.0]])
LENGTHS = torch.tensor([1, 3])


@pytest.fixture
def place(tmp_path):
    return tiny_encoders.save_encoder("bert", tmp_path)


def read(path, **options):
    return read_pooling_config(find_model(ModelSource(path=str(path), **options)), default_pooling="mean", device=CPU)


def refused(path, match, **options):
    with pytest.raises(ModelLoadError, match=match):
        read(path, **options)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("last", [[3, 4], [5, 10]]), ("cls", [[3, 4], [1, 0]]), ("mean", [[3, 4], [3, 4]])],
)
def test_poolings_are_what_they_are_called(pooling, expected):
    vectors = PoolingConfig(pooling=pooling, normalize=False).vectors(HIDDEN, LENGTHS)
    assert vectors.tolist() == expected


def test_vectors_are_scaled_to_length_one():
    assert torch.allclose(
        PoolingConfig(pooling="mean").vectors(HIDDEN, LENGTHS), torch.tensor([[0.6, 0.8], [0.6, 0.8]])
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pooling_computes_in_float32(dtype):
    hidden = torch.full((300, 1), 0.1, dtype=dtype)
    vectors = PoolingConfig(pooling="mean", normalize=False).vectors(hidden, torch.tensor([300]))
    assert vectors.dtype is torch.float32
    assert float(vectors) == pytest.approx(float(hidden[0]), rel=1e-6)


def test_without_files_the_default_holds(place):
    pooling_config = read(place)
    assert (pooling_config.pooling, pooling_config.dense, pooling_config.normalize, pooling_config.max_seq_length) == (
        "mean",
        (),
        True,
        0,
    )


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({}, "mean"),
    ],
)
def test_the_files_say_which_hidden_states_count(place, config, pooling):
    write_modules(place, "Transformer", "Pooling", "Normalize")
    write_json(place, "1_Pooling/config.json", config)
    assert read(place).pooling == pooling


def test_the_configuration_overrides_the_files(place):
    write_modules(place, "Transformer", "Pooling", "Normalize")
    write_json(place, "1_Pooling/config.json", {"pooling_mode_max_tokens": True})
    pooling_config = read(place, pooling="cls", normalize_embeddings=False)
    assert (pooling_config.pooling, pooling_config.normalize) == ("cls", False)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"pooling_mode_max_tokens": True}, "max pooling"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls and mean pooling"),
        ({"pooling_mode": "weightedmean"}, "weightedmean pooling"),
    ],
)
def test_other_poolings_are_refused_by_name(place, config, named):
    write_modules(place, "Transformer", "Pooling")
    write_json(place, "1_Pooling/config.json", config)
    refused(place, f"1_Pooling/config.json asks for {named}; computed are: last, mean, cls")


@pytest.mark.parametrize(
    "kinds",
    [
        ("Transformer", "Pooling", "Normalize", "Dense"),
        ("Transformer", "WordWeights", "Pooling"),
        ("Transformer",),
        ("BoW", "Pooling"),
    ],
)
def test_other_modules_are_refused_by_name(place, kinds):
    write_modules(place, *kinds)
    refused(place, "modules.json asks for " + " ▶ ".join(kinds))


def dense(place, *, config=None, has_bias=True, **tensors):
    write_modules(place, "Transformer", "Pooling", "Dense", "Normalize")
    write_json(place, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    content = {
        "in_features": 2,
        "out_features": 3,
        "bias": has_bias,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_json(place, "2_Dense/config.json", {**content, **(config or {})})
    if tensors:
        save_file({f"linear.{name}": tensor for name, tensor in tensors.items()}, place / "2_Dense/model.safetensors")


@pytest.mark.parametrize("has_bias", [True, False])
def test_dense_layers_follow_pooling(place, has_bias):
    weight, bias = torch.tensor([[1.0, 0], [0, 1], [1, -1]]), torch.tensor([0.5, 0, 0])
    dense(place, has_bias=has_bias, weight=weight, **({"bias": bias} if has_bias else {}))
    found = read(place, normalize_embeddings=False).vectors(HIDDEN, LENGTHS)
    expected = np.tanh(np.array([[3, 4, -1], [3, 4, -1]]) + (bias.numpy() if has_bias else 0))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"use_residual": True},
        {"module_input_name": "token_embeddings"},
        {"activation_function": "torch.nn.modules.activation.Softplus"},
        {"activation_function": "somebody.else.Tanh"},
    ],
)
def test_other_dense_layers_are_refused(place, config):
    dense(place, config=config, weight=torch.zeros(3, 2))
    refused(place, "asks for a dense layer .* that is not computed here")


def test_dense_weights_are_read_from_safetensors_alone(place):
    dense(place)
    (place / "2_Dense/pytorch_model.bin").touch()
    refused(place, "no 2_Dense/model.safetensors there.*pickled")


def test_dense_weights_must_be_all_there(place):
    dense(place, weight=torch.zeros(3, 2))
    refused(place, r"lacks weights; it has \['linear.weight'\]")


def test_missing_and_broken_files_are_named(place):
    write_modules(place, "Transformer", "Pooling")
    refused(place, "no 1_Pooling/config.json there, which modules.json names")
    (place / "modules.json").write_text("{")
    refused(place, "modules.json cannot be read")


def test_the_files_say_how_long_a_text_may_be(place):
    write_json(place, "tokenizer_config.json", {"model_max_length": 48})
    assert read(place).max_seq_length == 48
    write_json(place, "sentence_bert_config.json", {"max_seq_length": 40})
    assert read(place).max_seq_length == 40
    write_json(place, "sentence_bert_config.json", {"max_seq_length": None})
    write_json(place, "tokenizer_config.json", {"model_max_length": 10**30})
    assert read(place).max_seq_length == 0


def test_texts_that_would_have_to_be_lower_cased_first_are_refused(place):
    write_json(place, "sentence_bert_config.json", {"do_lower_case": True})
    refused(place, "lower-cased before they are tokenized")
    write_json(place, "tokenizer_config.json", {"do_lower_case": True})
    assert read(place).pooling == "mean"


def test_a_prompt_that_belongs_before_every_text_is_pointed_out(place, caplog):
    content = {"prompts": {"query": "query: ", "none": ""}, "default_prompt_name": "query"}
    write_json(place, "config_sentence_transformers.json", content)
    read(place)
    assert "expects 'query: ' before every text" in caplog.text
    caplog.clear()
    write_json(place, "config_sentence_transformers.json", {**content, "default_prompt_name": "none"})
    read(place)
    assert not [entry for entry in caplog.records if entry.levelname == "WARNING"]


def test_files_beside_a_gguf_file_are_not_its_own(tmp_path):
    pytest.importorskip("gguf")
    from support.backends import tiny_models

    path = tiny_models.save_gguf(tmp_path)
    write_modules(tmp_path, "BoW")
    assert read(path).pooling == "mean"
