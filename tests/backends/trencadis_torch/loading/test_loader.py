from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers as hf

from support.backends import tiny_models
from trencadis.errors import ModelLoadError
from trencadis.records import ModelSource
from trencadis_torch.loading.loader import find_model, load_decoder

CPU = torch.device("cpu")


def load(path, **options):
    return load_decoder(find_model(ModelSource(path=str(path), **options)), CPU)


def refused(path, match, **options):
    with pytest.raises(ModelLoadError, match=match):
        load(path, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "asked", "held"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.float16, "float16", torch.float16),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_weights_are_held_in_the_dtype_that_was_asked_for(tmp_path, stored, asked, held):
    model = load(tiny_models.save_model("llama", tmp_path, dtype=stored), dtype=asked)
    assert model.dtype is held
    expected = tiny_models.make_model("llama", dtype=stored).lm_head.weight
    assert torch.equal(model.lm_head.weight, expected.to(held))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_unknown_dtype_is_refused(model_path):
    refused(model_path("llama"), "int4", dtype="int4")


def test_missing_directory_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere: no such directory")
    refused("./nowhere/at/all", "no such directory.*hub id")
    refused(tmp_path / "model.gguf", "model.gguf: no such file")


def test_directory_without_config_is_named(tmp_path):
    refused(tmp_path, "no config.json")


def test_directory_without_safetensors_names_what_is_there(tmp_path, model_path):
    shutil.copy(model_path("llama") / "config.json", tmp_path)
    refused(tmp_path, r"no \*.safetensors file there\. Weights")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, r"Found pytorch_model.bin.*safetensors")


def test_missing_weights_are_no_random_weights(tmp_path, model_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_path("llama"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path, "1 weights are missing.*model.layers.1.mlp.up_proj.weight")


def test_broken_weights_file_is_named(tmp_path, model_path):
    shutil.copy(model_path("llama") / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    refused(tmp_path, r"\(llama\) cannot be loaded")


def write_config(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_unknown_architecture_is_named(tmp_path):
    refused(write_config(tmp_path, model_type="hal9000"), "config cannot be read.*hal9000")


def test_encoder_decoder_is_refused(tmp_path):
    hf.T5Config(vocab_size=50, d_model=16, num_layers=1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, "t5 is an encoder-decoder model")


def test_linear_attention_is_refused_with_its_layer(tmp_path):
    hf.Qwen3NextConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, "qwen3_next: layer 0 is linear_attention; recurrent state")


def test_unknown_kind_of_attention_is_refused(tmp_path):
    hf.Llama4TextConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, "llama4_text: layer 0 is chunked_attention, which is not supported")


def test_cross_attention_is_refused(tmp_path):
    hf.GPT2Config(add_cross_attention=True).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, "gpt2 has cross attention")


@pytest.mark.representatives(2)
def test_model_without_a_language_head_is_refused(tmp_path):
    hf.ViTConfig().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, "no causal language model of model_type .vit.")


def test_progress_bars_are_switched_on_again(model_path):
    path = model_path("llama")
    hf.utils.logging.enable_progress_bar()
    load(path)
    assert hf.utils.logging.is_progress_bar_enabled()


def test_gguf_file_has_the_weights_that_were_put_in(tmp_path):
    pytest.importorskip("gguf")
    path = tiny_models.save_gguf(tmp_path)
    model, expected = load(path), tiny_models.make_model("llama")
    tokens = torch.tensor([tiny_models.prompt(9)])
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, atol=1e-4, rtol=1e-4)
