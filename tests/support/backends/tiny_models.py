"""Tiny random models of real architectures, and what transformers itself generates with them.

Weights are drawn wide (``initializer_range``) so that the two most likely tokens are far apart: equality of greedy tokens is then a
statement about arithmetic, not about luck with near ties. ``greedy_reference`` checks the gap.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 131
MARGIN = 1e-3
"""The least gap between the two best logits on a reference text; float32 sums in another order differ by about 1e-5."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _config(kind: str) -> Any:
    import transformers as hf

    common, without_head_dim = _COMMON, {name: value for name, value in _COMMON.items() if name != "head_dim"}
    match kind:
        case "llama":
            return hf.LlamaConfig(**common)
        case "qwen2":
            return hf.Qwen2Config(**without_head_dim)
        case "qwen3":
            return hf.Qwen3Config(**common)
        case "mistral":
            return hf.MistralConfig(**common, sliding_window=7)
        case "gemma2":
            return hf.Gemma2Config(
                **common,
                sliding_window=7,
                layer_types=_MIXED,
                query_pre_attn_scalar=12,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=20.0,
            )
        case "gemma3":
            return hf.Gemma3TextConfig(**common, sliding_window=7, layer_types=_MIXED, query_pre_attn_scalar=12)
        case "phi3":
            return hf.Phi3Config(**without_head_dim, sliding_window=9)
        case "gpt2":
            return hf.GPT2Config(
                vocab_size=VOCAB_SIZE, n_positions=256, n_embd=48, n_layer=3, n_head=4, initializer_range=0.3
            )
        case "gpt_neox":
            return hf.GPTNeoXConfig(**{**without_head_dim, "rotary_pct": 0.5})
        case "mixtral":
            return hf.MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)
        case "qwen3_moe":
            return hf.Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40)
        case "gpt_oss":
            return hf.GptOssConfig(
                **common, sliding_window=8, layer_types=_MIXED, num_local_experts=4, num_experts_per_tok=2
            )
    raise ValueError(f"no tiny model of kind {kind!r}")


ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
)


_SEEDS = {"gemma3": 8}
"""Of the weights, where the default makes two tokens nearly equal."""


def make_model(kind: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model of an architecture, in evaluation mode, with its own eager attention."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(_SEEDS.get(kind, 7))
        model = AutoModelForCausalLM.from_config(_config(kind), attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and ("bias" in name or "sinks" in name):
                    parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = 2
    return model.to(dtype).eval()


def save_model(kind: str, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny model as ``directory/<kind>``, safetensors and config, and return that path."""
    path = directory / kind
    make_model(kind, dtype=dtype).save_pretrained(path)
    return path


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Return made-up prompt tokens, none of them special. Pure."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@cache
def _loaded(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").float().eval()


def greedy_reference(path: Path, tokens: list[int], num_tokens: int) -> list[int]:
    """Return what transformers' own ``generate`` yields greedily, special tokens not ending it."""
    return list(_generated(path, tuple(tokens), num_tokens))


@cache
@torch.inference_mode()
def _generated(path: Path, tokens: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    result = _loaded(path).generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).topk(2).values
    margin = float((best[:, 0] - best[:, 1]).min())
    assert margin > MARGIN, f"two tokens within {margin:.2g} of each other: choose another seed"
    return tuple(result.sequences[0, len(tokens) :].tolist())


@torch.inference_mode()
def reference_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """Return transformers' own logits ``[len(tokens), V]`` in float32."""
    logits: torch.Tensor = _loaded(path)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def save_gguf(directory: Path) -> Path:
    """Write the tiny Llama as a .gguf file in float32 and return its path.

    The format stores query and key weights with the two halves of each head's rotary dimensions interleaved.
    """
    from support.backends.gguf_mixtures import in_file
    from support.gguf_writing import write_gguf

    model, tensors = make_model("llama"), {}
    config = model.config
    metadata = {
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".block_count": config.num_hidden_layers,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        **dict.fromkeys((".attention.key_length", ".attention.value_length", ".rope.dimension_count"), config.head_dim),
        ".rope.freq_base": float(config.rope_parameters["rope_theta"]),
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.view(-1, 2, config.head_dim // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous()  # noqa: PLW2901
        tensors[in_file(name, "llama")] = tensor.numpy()
    return write_gguf(directory / "tiny.gguf", "llama", metadata=metadata, tensors=tensors)


def save_changed(kind: str, path: Path, *, seed: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a tiny model of a configuration that was changed, drawn as transformers does it, and return its path."""
    from transformers import AutoModelForCausalLM

    config = _config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(path)
    return path
