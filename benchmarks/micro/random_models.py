"""Models of usual shapes with random weights, for measurements that do not depend on what a model says."""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path
from typing import Any

LLAMA_110M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
QWEN3_05B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
}


def save_random_model(shape: dict[str, Any], directory: Path) -> Path:
    """Write random weights with the demo model's tokenizer and return the directory.

    Args:
        shape: A configuration of transformers, ``model_type`` included.
        directory: Where.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(str(importlib.resources.files("trencadis") / "demo" / "target"), directory, dirs_exist_ok=True)
    options = dict(shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options)).save_pretrained(
        directory
    )
    return directory
