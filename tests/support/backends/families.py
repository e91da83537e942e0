"""Families of decoders in transformers 5.24 as tiny random models, and which of them are served: one table for all backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.backends import tiny_models

SERVED = (
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "codegen", "cohere", "cohere2",
    "cohere2_moe", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4",
    "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss",
    "gptj", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hy_v3", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "llama", "mellum", "mimo_v2_flash", "minicpm3",
    "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat",
    "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
"""Served by the backend ``torch``."""

PUBLISHED = ("gemma4", "granitemoehybrid-dense", "hunyuan_v1_moe")
"""Served too, in the structure of published checkpoints: Gemma 4 with its vision tower, Granite 4.0 without Mamba layers."""

MIXTURES = (
    "afmoe", "aria_text", "axk1", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoeshared", "hy_v3", "kolibri1", "laguna", "mellum",
    "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "sarvam_mla",
    "sarvam_moe", "solar_open",
)  # fmt: skip
"""Of these, the ones with experts that ranks may have as wholes."""

IN_ONE_CALL = (
    "arcee", "aria_text", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4",
    "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox",
    "gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hy_v3", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "kolibri1", "llama", "mellum", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "olmo",
    "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "sarvam_moe", "seed_oss", "smollm3",
    "solar_open", "starcoder2", "vaultgemma",
)  # fmt: skip
"""Of these, the ones whose passes the backend ``torch`` runs in one call on a CPU."""

DIFFERING_KV_HEADS = {"mimo_v2_flash"}
"""Of these, the ones whose layers differ in their KV heads."""

REFUSED_ON_GAUDI = {
    "deepseek_v2": "complex numbers",
    "gemma3n_text": "writes through a view",
    "jetmoe": "depend on the routing",
}
"""Of these, the ones that a Gaudi cannot run, with words of the reason."""

REFUSED = (
    "axk2", "bailing_hybrid", "bamba", "bloom", "cpmant", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dory",
    "dots3_note_text", "falcon", "falcon_h1", "falcon_mamba", "glm_moe_dsa", "gpt_neo", "gpt_neox_japanese", "granite_swa",
    "granitemoe_swa", "granitemoehybrid", "hrm_text", "hy_v4", "inkling_text", "jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3",
    "llama4_text", "mamba", "mamba2", "minimax", "mpt", "nemotron", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "stablelm", "xglm", "xlstm", "zaya",
)  # fmt: skip
"""Refused by both: recurrent state, masks that are neither causal nor a window, or attention that is not handed out."""

_SIZES: dict[str, Any] = {**tiny_models._COMMON, "num_hidden_layers": 2, "initializer_range": 0.1}
_EXPERTS = {
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
_LATENT = {
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
_GPTJ = {"rotary_dim": 8, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 256}
_CONV = {"layer_types": ["conv", "full_attention"]}
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
}
_GEMMA_4 = {
    **tiny_models._COMMON,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": tiny_models.VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "initializer_range": 0.1,
}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"), _LATENT
    ),
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 12},
    "codegen": _GPTJ,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": tiny_models.VOCAB_SIZE,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_text": {"vocab_size_per_layer_input": tiny_models.VOCAB_SIZE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    "gptj": _GPTJ,
    "gemma4": {
        "text_config": _GEMMA_4,
        "vision_config": _VISION,
        "audio_config": None,
        **{f"{name}_token_id": 120 + place for place, name in enumerate(("image", "boi", "eoi", "audio", "video"))},
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 12},
    "granitemoehybrid-dense": {
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "mamba2": {"num_heads": 8, "head_dim": 12, "n_groups": 1},
    "stablelm": {"partial_rotary_factor": 0.5},
    "zaya": {"num_experts_per_tok": 1},
}
_UNSETTABLE = {"falcon": {"head_dim"}}


def save_family(kind: str, directory: Path) -> Path:
    """Write a tiny random model of a family as ``directory/<kind>`` and return that path."""
    if kind in tiny_models.ARCHITECTURES:
        return tiny_models.save_model(kind, directory)
    _made(kind).save_pretrained(directory / kind)
    return directory / kind


def make_family(kind: str, **changes: Any) -> Any:
    """Return a tiny random model of a family in evaluation mode, with random numbers added to its biases and to the weights of its norms."""
    generator = torch.Generator().manual_seed(4)
    model = (
        tiny_models.make_model(kind) if kind in tiny_models.ARCHITECTURES and not changes else _made(kind, **changes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.float().eval()


def _made(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    own = _OWN.get(kind, {})
    sizes = own if "text_config" in own else {**_SIZES, **_EXPERTS, **own}
    for name in _UNSETTABLE.get(kind, ()):
        del sizes[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind.removesuffix("-dense"), **{**sizes, **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.generation_config.eos_token_id = 2
    return model


def save_with_biases(kind: str, directory: Path) -> Path:
    """Write the same with random numbers added to its biases, which begin as zeros; returns its path."""
    from safetensors.torch import load_file, save_file

    path = save_family(kind, directory)
    file, generator = path / "model.safetensors", torch.Generator().manual_seed(4)
    weights = load_file(file)
    for name, one in weights.items():
        if "bias" in name and one.is_floating_point():
            weights[name] = one + 0.1 * torch.randn(one.shape, generator=generator)
    save_file(weights, file, metadata={"format": "pt"})
    return path
