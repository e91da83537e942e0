"""Models whose modules are changed for a graph compute what they did before."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from support.backends import gaudi_engines, tiny_models
from trencadis.errors import ModelLoadError
from trencadis_gaudi.static_modules import make_static

FACTORS = {"short_factor": [1.1] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 128}
ROPES = {
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **FACTORS},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128},
    "phimoe": {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.3, **FACTORS},
}


MLA = {
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 4,
}
KINDS = (*ROPES, "padding", "latent")


def make(kind):
    sizes = {**tiny_models._COMMON, "num_hidden_layers": 2}
    match kind:
        case "phimoe":
            config = hf.PhimoeConfig(**sizes, rope_parameters=ROPES[kind], num_local_experts=4, num_experts_per_tok=2)
        case "padding":
            config = hf.GPT2Config(
                vocab_size=131, n_positions=256, n_embd=48, n_layer=2, n_head=4, pad_token_id=0, initializer_range=0.3
            )
        case "latent":
            config = hf.DeepseekV3Config(**{**sizes, **MLA, "num_key_value_heads": 4, "first_k_dense_replace": 2})
        case _:
            config = hf.LlamaConfig(**sizes, rope_parameters=ROPES[kind])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = 2
    return model


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_stay_the_same(kind):
    model, tokens = make(kind), torch.tensor([tiny_models.prompt(100)])
    before = model(tokens, use_cache=False).logits
    make_static(model, in_graphs=True)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "compile"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_are_captured_and_generate_what_the_backend_torch_does(tmp_path, kind, mode):
    make(kind).save_pretrained(tmp_path)
    texts = []
    for options in ({"backend": "torch"}, {"mode": mode, "emulated_frozen": True, "strategy_options": {"limit": 1}}):
        engine = gaudi_engines.open_engine(tmp_path, **options)
        finished = gaudi_engines.serve(engine, 3, num_requests=3, greedy=True)
        texts.append({name: one.token_ids.tolist() for name, one in finished.items()})
        engine.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "modes"), [("DeepseekV2RotaryEmbedding", (True, False)), ("Gemma3nTextAltUp", (True,))]
)
def test_modules_without_an_equivalent_are_refused_in_words(name, modes):
    model = torch.nn.Sequential(type(name, (torch.nn.Module,), {})())
    for in_graphs in (True, False):
        if in_graphs not in modes:
            make_static(model, in_graphs=in_graphs)
            continue
        with pytest.raises(ModelLoadError, match=f"{name} .* a Gaudi") as caught:
            make_static(model, in_graphs=in_graphs)
        assert "torch" in caught.value.hint
