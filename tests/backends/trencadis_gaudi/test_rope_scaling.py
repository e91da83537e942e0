"""Frequencies of rotary embeddings stay what a model was trained with, and its logits what they were."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from support.backends import gaudi_engines, tiny_models
from trencadis_gaudi.rope_scaling import fix_frequencies

FACTORS = {"short_factor": [1.1] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 128}
ROPES = {
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **FACTORS},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128},
    "phimoe": {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.3, **FACTORS},
}


def make(rope):
    sizes = {**tiny_models._COMMON, "num_hidden_layers": 2, "rope_parameters": ROPES[rope]}
    if rope == "phimoe":
        config = hf.PhimoeConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    else:
        config = hf.Phi3Config(**{**sizes, "head_dim": None}) if rope == "longrope" else hf.LlamaConfig(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = 2
    return model


@pytest.mark.parametrize("rope", ROPES)
@torch.inference_mode()
def test_logits_within_the_trained_length_stay_the_same(rope):
    model, tokens = make(rope), torch.tensor([tiny_models.prompt(100)])
    before = model(tokens, use_cache=False).logits
    fix_frequencies(model)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "compile"])
@pytest.mark.parametrize("rope", ROPES)
def test_models_whose_forward_would_choose_its_frequencies_are_captured(tmp_path, rope, mode):
    make(rope).save_pretrained(tmp_path)
    texts = []
    for options in ({"backend": "torch"}, {"mode": mode, "emulated_frozen": True, "strategy_options": {"limit": 1}}):
        engine = gaudi_engines.open_engine(tmp_path, **options)
        finished = gaudi_engines.serve(engine, 3, num_requests=3, greedy=True)
        texts.append({name: one.token_ids.tolist() for name, one in finished.items()})
        engine.close()
    assert texts[0] == texts[1]
