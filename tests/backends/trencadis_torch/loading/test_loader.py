from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers as hf
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function
from transformers.masking_utils import sliding_window_causal_mask_function as sliding

from support.backends import tiny_encoders, tiny_models
from trencadis.errors import ModelLoadError
from trencadis.records import ModelSource
from trencadis_torch.loading.inspection import attention_layers, encoder_facts, model_facts, window_of
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


@pytest.mark.parametrize(
    ("path", "words"),
    [("nowhere", "nowhere: no such directory"), ("model.gguf", "model.gguf: no such file"), (".", "no config.json")],
)
@pytest.mark.representatives(3)
def test_what_is_not_there_is_named(tmp_path, path, words):
    refused(tmp_path / path, words)


def test_directory_without_safetensors_names_what_is_there(tmp_path, model_path):
    refused("./nowhere/at/all", "no such directory.*hub id")
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


LINEAR = hf.Qwen3NextConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4)
CHUNKED = hf.Llama4TextConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "config cannot be read.*hal9000"),
        (hf.T5Config(vocab_size=50, d_model=16, num_layers=1), "t5 is an encoder-decoder model"),
        (LINEAR, "qwen3_next: layer 0 is linear_attention; recurrent state"),
        (CHUNKED, "llama4_text: layer 0 is chunked_attention, which is not supported"),
        (hf.GPT2Config(add_cross_attention=True), "gpt2 has cross attention"),
        (hf.ViTConfig(), "no causal language model of model_type .vit."),
        (hf.Wav2Vec2Config(), "no causal language model of model_type .wav2vec2."),
        *((hf.AutoConfig.for_model(kind), f"{kind} is a model of images and text") for kind in ("llava", "qwen2_vl")),
    ],
    ids=lambda value: getattr(value, "model_type", None) or "",
)
@pytest.mark.representatives(3, ci=9)
def test_configurations_that_are_not_served_are_refused_in_words(tmp_path, config, words):
    if config is None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "hal9000"}))
    else:
        config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, words)


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


SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def windows(kind):
    return [layer.window for layer in attention_layers(tiny_models.make_model(kind))]


def test_windows_are_those_of_the_masks_layer_by_layer():
    assert windows("llama") == [0, 0, 0]
    assert windows("gemma3") == [7, 0, 7]
    assert windows("phi3") == [9, 9, 9]


def test_window_longer_than_the_probe_is_found():
    model = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=4096))
    assert [layer.window for layer in attention_layers(model)] == [4096, 4096]


@pytest.mark.parametrize("window", [1, 2, 7, 4096])
def test_window_of_a_sliding_mask_is_its_own(window):
    assert window_of(sliding(window), window) == window


def test_mask_that_is_not_what_it_claims_is_refused():
    assert window_of(causal_mask_function, 0) == 0
    assert window_of(sliding(9), 8) == -1
    assert window_of(sliding(9), 0) == -1
    assert window_of(causal_mask_function, 8) == -1
    assert window_of(chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.long)), 64) == -1
    assert window_of(lambda batch, head, query, key: key == key, 0) == -1


def test_shapes_of_keys_and_values_are_observed():
    first, _, last = attention_layers(tiny_models.make_model("llama"))
    assert (first.num_kv_heads, first.key_dim, first.value_dim, first.dtype) == (2, 12, 12, torch.float32)
    assert last.index == 2


def test_latent_attention_has_narrower_values():
    config = hf.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 2},
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    layers = attention_layers(hf.DeepseekV3ForCausalLM(config).eval())
    assert {(layer.key_dim, layer.value_dim) for layer in layers} == {(12, 6)}


LLAMA_4 = {"attention_chunk_size": 64, "num_local_experts": 2, "intermediate_size_mlp": 16, "pad_token_id": 0}
NOT_SERVED = [
    (hf.Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True), "layer 0"),
    (hf.Llama4TextConfig(**SMALL, head_dim=8, **LLAMA_4), "mask of layer 0 is neither causal nor a sliding window"),
    (
        hf.MambaConfig(vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=2),
        "MambaForCausalLM keeps recurrent state",
    ),
    (hf.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2), "takes no positions"),
]


@pytest.mark.representatives(2, ci=4)
@pytest.mark.parametrize(("config", "words"), NOT_SERVED, ids=[config.model_type for config, _ in NOT_SERVED])
def test_attention_that_is_neither_causal_nor_a_window_is_refused(config, words):
    with pytest.raises(ModelLoadError, match=words):
        attention_layers(hf.AutoModelForCausalLM.from_config(config).eval())


def test_model_with_attention_of_its_own_is_refused():
    model = tiny_models.make_model("llama")
    # Which architectures are so changes with transformers; each answers like this.
    model.set_attn_implementation = lambda _: None
    with pytest.raises(
        ModelLoadError, match=r"LlamaForCausalLM does not take its attention from .* AttentionInterface"
    ):
        attention_layers(model)


def test_facts_come_from_the_model():
    model = tiny_models.make_model("llama")
    facts = model_facts(model, attention_layers(model))
    assert (facts.architecture, facts.dtype, facts.vocab_size) == ("LlamaForCausalLM", "float32", 131)
    assert (facts.max_model_len, facts.eos_token_ids) == (256, (2,))
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert facts.weights_bytes == 4 * facts.num_parameters
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * 12 * 4


def test_shared_weights_count_once():
    model = tiny_models.make_model("gpt2")
    facts = model_facts(model, attention_layers(model))
    assert facts.num_parameters == model.num_parameters()


def test_several_end_tokens_are_kept_and_none_is_none():
    model = tiny_models.make_model("llama")
    layers = attention_layers(model)
    model.generation_config.eos_token_id = [5, 9]
    assert model_facts(model, layers).eos_token_ids == (5, 9), "2 is the default of the class"
    model.config.eos_token_id = [9, 7]
    assert model_facts(model, layers).eos_token_ids == (5, 9, 7)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert model_facts(model, layers).eos_token_ids == ()


def test_lengths_at_which_positions_change_their_encoding_end_the_model():
    config = hf.Phi3Config(
        **SMALL,
        max_position_embeddings=4096,
        original_max_position_embeddings=128,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 128,
        },
    )
    model = hf.Phi3ForCausalLM(config).eval()
    assert model_facts(model, attention_layers(model)).max_model_len == 128


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("kind", "asked", "expected"), [("bert", 0, 64), ("bert", 20, 20), ("bert", 99, 64), ("roberta", 0, 64)]
)
def test_an_encoder_takes_texts_as_long_as_its_positions_and_its_files_allow(tmp_path, kind, asked, expected):
    model = hf.AutoModel.from_pretrained(tiny_encoders.save_encoder(kind, tmp_path))
    facts = encoder_facts(model, asked)
    assert (facts.max_model_len, facts.vocab_size, facts.generates) == (expected, tiny_models.VOCAB_SIZE, False)
    assert (facts.kv_bytes_per_token, facts.eos_token_ids) == (0, ())
    assert facts.num_parameters == model.num_parameters()
    assert facts.weights_bytes == 4 * model.num_parameters()
