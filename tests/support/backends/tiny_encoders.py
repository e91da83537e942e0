"""Tiny random models that only embed, and their vectors by transformers alone: one text at a time, nothing padded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from support.backends.tiny_models import VOCAB_SIZE

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


def _config(kind: str) -> Any:
    import transformers as hf

    match kind:
        case "bert":
            return hf.BertConfig(**_COMMON, max_position_embeddings=64)
        case "roberta":
            return hf.RobertaConfig(**_COMMON, max_position_embeddings=66, pad_token_id=1)
        case "distilbert":
            return hf.DistilBertConfig(
                vocab_size=VOCAB_SIZE, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64
            )
        case "mpnet":
            return hf.MPNetConfig(**_COMMON, max_position_embeddings=66, pad_token_id=1)
        case "modernbert":
            return hf.ModernBertConfig(
                **_COMMON,
                max_position_embeddings=64,
                local_attention=8,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                cls_token_id=1,
                sep_token_id=2,
            )
        case "fnet":
            return hf.FNetConfig(**{k: v for k, v in _COMMON.items() if "heads" not in k}, max_position_embeddings=64)
        case "qwen3":
            return hf.Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    raise ValueError(f"no tiny encoder of kind {kind!r}")


def save_encoder(kind: str, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny model without any head as ``directory/<kind>`` and return that path."""
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModel.from_config(_config(kind))
    path = directory / kind
    model.to(dtype).save_pretrained(path)
    return path


def write_json(path: Path, name: str, content: Any) -> None:
    """Write a file of a model's directory, with the folders it needs."""
    file = path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def write_modules(path: Path, *kinds: str) -> None:
    """Write ``modules.json`` of sentence-transformers; the folder of the second is ``1_Pooling`` and so on."""
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    write_json(path, "modules.json", entries)


@cache
def _loaded(path: Path) -> Any:
    from transformers import AutoModel

    # A decoder's head is left out: AutoModel says so on standard error, which is no test's business.
    return AutoModel.from_pretrained(path, attn_implementation="eager").float().eval()


@torch.inference_mode()
def reference_vector(path: Path, tokens: Sequence[int], pooling: str, *, normalize: bool = True) -> torch.Tensor:
    """Return the vector of one text by the definition of each pooling, float32."""
    hidden = _loaded(path)(input_ids=torch.tensor([list(tokens)])).last_hidden_state[0]
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.sum(0) / len(tokens)}[pooling]
    return vector / (vector * vector).sum().sqrt() if normalize else vector
