"""Random mixtures of experts as ``.gguf`` files, and the same dequantised for transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from support.backends import tiny_models
from support.gguf_writing import write_gguf

SIZES = {
    ".context_length": 256,
    ".embedding_length": 64,
    ".block_count": 2,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 1e-5,
    ".attention.key_length": 16,
    ".rope.dimension_count": 16,
    ".rope.freq_base": 10000.0,
    ".vocab_size": tiny_models.VOCAB_SIZE,
    ".expert_used_count": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "qwen2moe": {".expert_shared_feed_forward_length": 64},
    "gpt-oss": {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0, ".rope.scaling.original_context_length": 64},
    "minimax-m2": {".expert_gating_func": 2},
}
FORMS = {
    "llama": "int4 in groups of 32",
    "olmoe": "int8 in groups of 32",
    "qwen3moe": "int4 in groups of 32",
    "qwen2moe": "int8 in groups of 32",
    "gpt-oss": "4 bit levels in groups of 32",
    "minimax-m2": "4 bit levels in groups of 32",
}
KINDS = {
    "llama": "Q4_0",
    "olmoe": "Q8_0",
    "qwen3moe": "Q4_1",
    "qwen2moe": "Q5_0",
    "gpt-oss": "MXFP4",
    "minimax-m2": "MXFP4",
}
NAMES = {
    r"model\.embed_tokens": "token_embd",
    r"model\.norm": "output_norm",
    r"lm_head": "output",
    r"model\.layers\.(\d+)\.": r"blk.\1.",
    r"self_attn\.(q|k)_norm": r"attn_\1_norm",
    r"self_attn\.(q|k|v)_proj": r"attn_\1",
    r"self_attn\.o_proj": "attn_output",
    r"self_attn\.sinks": "attn_sinks.weight",
    r"input_layernorm": "attn_norm",
    r"mlp\.(gate|router)\.": "ffn_gate_inp.",
    r"mlp\.shared_expert\.(gate|up|down)_proj": r"ffn_\1_shexp",
    r"mlp\.shared_expert_gate": "ffn_gate_inp_shexp",
    r"mlp\.e_score_correction_bias": "exp_probs_b.bias",
    r"mlp\.experts\.(\w+)_proj_bias": r"ffn_\1_exps.bias",
    r"mlp\.experts\.(\w+)_proj": r"ffn_\1_exps.weight",
    r"mlp\.(gate|up|down)_proj": r"ffn_\1",
}
"""Names of llama.cpp by transformers', written down once more."""


def in_file(name: str, architecture: str) -> str:
    for own, other in NAMES.items():
        name = re.sub(own, other, name)
    return name.replace("post_attention_layernorm", "post_attention_norm" if architecture == "gpt-oss" else "ffn_norm")


def views(name: str, tensor: torch.Tensor, architecture: str) -> dict[str, torch.Tensor]:
    """Return what the file has of one of the model's weights, as views of it."""
    if architecture == "llama" and re.search("attn_[qk].weight", name):  # pairs stand beside each other
        return {name: tensor.view(-1, 2, 8, tensor.shape[1]).transpose(1, 2)}
    if "gate_inp_shexp" in name:
        return {name: tensor[0]}
    if "gate_up" not in name:
        return {name: tensor.transpose(1, 2) if architecture == "gpt-oss" and tensor.dim() == 3 else tensor}
    if architecture == "gpt-oss":  # transposed, gates and values in turn
        pair = [tensor[..., side::2] for side in (0, 1)]
        pair = [one.transpose(1, 2) if one.dim() == 3 else one for one in pair]
    else:
        pair = list(tensor.chunk(2, 1))
    return {name.replace("gate_up", side): one for side, one in zip(("gate", "up"), pair, strict=True)}


def save_gguf_mixture(
    directory: Path, architecture: str, *, num_experts: int = 5, inner_size: int = 96
) -> tuple[Path, Path]:
    """Write a random mixture, whose experts have a kind of their own; returns the file, and a directory with the same dequantised."""
    import gguf
    from transformers import AutoModelForCausalLM

    from trencadis.gguf_file import read_gguf
    from trencadis_torch.loading.gguf_config import gguf_config

    sizes = dict.fromkeys((".feed_forward_length", ".expert_feed_forward_length"), inner_size)
    sizes[".expert_count"] = num_experts
    metadata = SIZES | sizes | MORE.get(architecture, {})
    output = {"output.weight": torch.zeros(1).numpy()}
    config = gguf_config(read_gguf(write_gguf(directory / "a.gguf", architecture, metadata=metadata, tensors=output)))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for one in model.state_dict().values():
            one.add_(torch.randn(one.shape), alpha=0.1)
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        for part, view in views(in_file(name, architecture), tensor, architecture).items():
            shape = view.shape if view.dim() < 4 else (-1, view.shape[-1])
            plain = view.reshape(shape).contiguous().numpy()
            tensors[part] = plain
            if plain.ndim > 1 and "gate_inp" not in part and not part.endswith("bias"):
                kind = KINDS[architecture] if "_exps" in part else "Q8_0"
                blocks = gguf.quants.quantize(plain, gguf.GGMLQuantizationType[kind])
                plain = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
                view.copy_(torch.from_numpy(plain).view(view.shape))
                tensors[part] = (blocks.view("u1"), kind)
    model.save_pretrained(directory / "floats")
    return write_gguf(
        directory / "mixture.gguf", architecture, metadata=metadata, tensors=tensors
    ), directory / "floats"
