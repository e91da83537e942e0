from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function
from transformers.masking_utils import sliding_window_causal_mask_function as sliding

from support.backends import tiny_encoders, tiny_models
from trencadis.errors import ModelLoadError
from trencadis_torch.loading.inspection import attention_layers, encoder_facts, model_facts, window_of

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


def test_two_way_mask_is_refused():
    config = hf.Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(ModelLoadError, match="layer 0"):
        attention_layers(hf.Gemma3ForCausalLM(config))


def test_chunked_attention_is_refused():
    config = hf.Llama4TextConfig(
        **SMALL, head_dim=8, attention_chunk_size=64, num_local_experts=2, intermediate_size_mlp=16, pad_token_id=0
    )
    with pytest.raises(ModelLoadError, match="mask of layer 0 is neither causal nor a sliding window"):
        attention_layers(hf.Llama4ForCausalLM(config).eval())


def test_recurrent_model_is_refused():
    config = hf.MambaConfig(vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match="MambaForCausalLM keeps recurrent state"):
        attention_layers(hf.MambaForCausalLM(config))


def test_model_without_positions_is_refused():
    config = hf.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(ModelLoadError, match="takes no positions"):
        attention_layers(hf.BloomForCausalLM(config))


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
