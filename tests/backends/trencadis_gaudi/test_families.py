"""Families of models that the backend ``torch`` runs, on the emulated device; the table in docs/gaudi.md lists them."""

from __future__ import annotations

import pytest
import torch

from support.backends import gaudi_engines, tiny_models

SIZES = {**tiny_models._COMMON, "num_hidden_layers": 2, "initializer_range": 0.1}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
    "ffn_dim": 80,
    "word_embed_proj_dim": 48,
}
OTHERS = (
    "apertus", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "glm4", "glm4_moe", "granite", "granitemoe", "helium",
    "olmo2", "olmoe", "opt", "phi", "qwen2_moe", "smollm3", "starcoder2",
)  # fmt: skip


def saved(kind, directory):
    if kind in tiny_models.ARCHITECTURES:
        return tiny_models.save_model(kind, directory)
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, **SIZES, **EXPERTS)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory / kind)
    return directory / kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*tiny_models.ARCHITECTURES, *OTHERS])
def test_family_generates_what_the_backend_torch_does(tmp_path, kind):
    path = saved(kind, tmp_path)
    texts = []
    for backend, options in (("torch", {}), ("gaudi", {"emulated_frozen": True, "check_model": True})):
        engine = gaudi_engines.open_engine(path, backend=backend, **options)
        finished = gaudi_engines.serve(engine, 3, num_requests=2, greedy=True)
        texts.append({name: one.token_ids.tolist() for name, one in finished.items()})
    assert texts[0] == texts[1]
