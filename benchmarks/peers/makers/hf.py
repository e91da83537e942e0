"""Writes a model with random weights, as transformers reads it.

Every weight has the variance ``1 / hidden_size``: states keep their size through the layers, and the largest logit is apart from the
second, so that engines that compute alike choose alike. With the usual 0.02 the tied embedding of the last token would always win.
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
import sys
from pathlib import Path
from typing import Any

SEED = 0
MAX_POSITIONS = 4096
CLASSES = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}


def make(shape: dict[str, Any], directory: str) -> None:
    config_name, model_name = CLASSES[shape["architecture"]]
    import torch
    import transformers

    source = Path(str(importlib.resources.files("trencadis") / "demo" / "target"))
    Path(directory).mkdir(parents=True, exist_ok=True)
    for file in source.glob("token*"):  # nothing is encoded; loaders want a tokenizer to be there
        shutil.copy(file, directory)
    torch.manual_seed(SEED)
    config = getattr(transformers, config_name)(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=0,
        dtype="float32",
        initializer_range=shape["hidden_size"] ** -0.5,
    )
    getattr(transformers, model_name)(config).save_pretrained(directory)


if __name__ == "__main__":
    make(json.loads(sys.argv[1]), sys.argv[2])
