"""A model's configuration out of the metadata of its ``.gguf`` file, by transformers' own tables of names.

Where those tables leave out what the file says and the model's outputs depend on, it is added here: scaled rotary embeddings, the width
of heads, soft caps, and the scale of attention where a size of a family has another than the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from trencadis.errors import ModelLoadError
from trencadis.gguf_file import ROTARY_FREQUENCIES, ROTARY_LONG, ROTARY_SHORT, GgufFile, StringList

__all__ = ["gguf_config"]

_MODEL_TYPES: Final[Mapping[str, str]] = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
}
"""Architectures whose name in transformers' tables is another."""

_TEXT_TYPES: Final[Mapping[str, str]] = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Families of whose models a file has the part for text alone."""

_TABLES: Final[Mapping[str, str]] = {"mixtral": "llama", "olmoe": "llama"}
"""Families without a table of their own, and that whose names they have."""

_MORE_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping"},
    "gpt_oss": {"attention.key_length": "head_dim"},
    "mixtral": {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    "olmoe": {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3_moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "qwen2_moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
}
"""Settings by their names in files, beside those in transformers' tables."""

_SCALED_BY_WIDTH: Final[Mapping[str, int]] = {"gemma2": 46, "gemma3": 62}
"""Layers of the size (27B) whose attention is scaled by the width of the model over its heads, not by that of a head.

Source: ``llama-model.cpp`` of ggml-org/llama.cpp, ``f_attention_scale``."""

_SCALING: Final[Mapping[str, str]] = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Settings of scaled rotary embeddings, by their names in files."""

_MORE_SCALING: Final[Mapping[str, Mapping[str, Any]]] = {"gpt_oss": {"truncate": False}}
"""Settings of scaled rotary embeddings that no file has: gpt-oss's ranges of frequencies have no whole numbers as ends."""

_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Scaling of all Llama 3 models whose rotary embeddings are scaled; a file has the quotients that they lead to."""


def gguf_config(file: GgufFile) -> Any:
    """Return a configuration of transformers.

    Args:
        file: The file's description.

    Raises:
        ModelLoadError: transformers has no mapping for the architecture, or the file's rotary embeddings cannot be described.
    """
    from transformers import AutoConfig

    settings = _by_own_function(file)
    if settings is None:
        settings = _by_table(file)
    ends = [settings["eos_token_id"]] if isinstance(settings.get("eos_token_id"), int) else []
    more = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    if ends and (others := [end for end in dict.fromkeys(more) if isinstance(end, int) and end not in ends]):
        settings["eos_token_id"] = ends + others
    return AutoConfig.for_model(**settings)


def _by_own_function(file: GgufFile) -> dict[str, Any] | None:
    """Return the settings of an architecture that transformers reads with a function; None: it does not."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config

    if file.architecture not in GGUF_CONFIG_ARCHS:
        return None
    metadata = {
        key: value.count if isinstance(value, StringList) else _plain(value) for key, value in file.metadata.items()
    }
    try:
        found: dict[str, Any] = get_gguf_config(metadata, tuple(file.tensors))
    except KeyError as error:
        raise ModelLoadError(f"{file.path}: its metadata has no {error.args[0]}.") from error
    return found


def _by_table(file: GgufFile) -> dict[str, Any]:
    from transformers import __version__
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    architecture = file.architecture
    family = _MODEL_TYPES.get(architecture, architecture)
    if family == "llama" and _own(file).get("expert_count"):
        family = "mixtral"
    known_as = _TABLES.get(family, family)
    if known_as not in GGUF_CONFIG_MAPPING or family in ("general", "tokenizer"):
        known = sorted({*GGUF_CONFIG_MAPPING, *_TABLES} - {"general", "tokenizer"})
        raise ModelLoadError(
            f"{file.path}: transformers {__version__} has no mapping for .gguf files of the architecture {architecture!r}.",
            hint=f"Give the model as a directory with config.json and *.safetensors. Mapped are: {', '.join(known)}.",
        )
    tables = {
        architecture: {**GGUF_CONFIG_MAPPING[known_as], **_MORE_NAMES.get(family, {})},
        "tokenizer": GGUF_CONFIG_MAPPING["tokenizer"],
    }
    settings: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(family, {}))
    settings["model_type"] = _TEXT_TYPES.get(family, family)
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors or family in ("falcon", "bloom")
    for key, value in file.metadata.items():
        prefix, _, rest = key.partition(".")
        name = tables.get(prefix, {}).get(rest)
        if name is not None and not isinstance(value, StringList):
            settings[name] = _plain(value)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringList):
        settings.setdefault("vocab_size", tokens.count)
    if "vocab_size" not in settings and (table := file.tensors.get("token_embd.weight")) is not None:
        settings["vocab_size"] = table.shape[0]
    settings.update(_of_family(file, family))
    if scaling := _rotary_scaling(file, settings):
        settings["rope_scaling"] = {**scaling, **_MORE_SCALING.get(family, {})}
    return settings


def _of_family(file: GgufFile, family: str) -> dict[str, Any]:
    """Return what single families need beside their table."""
    own = _own(file)
    if family == "stablelm":
        return {
            "use_qkv_bias": any(name.endswith(("attn_q.bias", "attn_k.bias", "attn_v.bias")) for name in file.tensors),
            "use_parallel_residual": not any("ffn_norm" in name for name in file.tensors),
        }
    if family == "gemma4":  # its generation config names three; a file, one
        return {"eos_token_id": [1, 106, 50]}
    if family == "minimax_m2":
        kind = own.get("expert_gating_func")
        return (
            {"scoring_func": {0: "none", 1: "softmax", 2: "sigmoid"}.get(kind, "softmax")} if kind is not None else {}
        )
    if family in _SCALED_BY_WIDTH and own.get("attention.key_length"):
        by_width = own.get("block_count") == _SCALED_BY_WIDTH[family]
        scale = own["embedding_length"] // own["attention.head_count"] if by_width else own["attention.key_length"]
        return {"query_pre_attn_scalar": scale}
    return {}


def _rotary_scaling(file: GgufFile, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return how rotary embeddings are scaled; empty: they are not.

    Raises:
        ModelLoadError: Transformers cannot scale them in the file's way.
    """
    own = _own(file)
    given = {name: own[f"rope.scaling.{key}"] for key, name in _SCALING.items() if f"rope.scaling.{key}" in own}
    if ROTARY_LONG in file.tensors or ROTARY_SHORT in file.tensors:
        factors = {"long_factor": _floats(file, ROTARY_LONG), "short_factor": _floats(file, ROTARY_SHORT)}
        return {"rope_type": "longrope", **given, **factors}
    if ROTARY_FREQUENCIES in file.tensors:
        return _llama3_scaling(file, settings)
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(
            f"{file.path}: its rotary embeddings are scaled by {kind!r}; linear, yarn and longrope are known."
        )
    return {"rope_type": kind, **given}


def _llama3_scaling(file: GgufFile, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that lead to the quotients in a file.

    Source: ``convert_hf_to_gguf.py`` of ggml-org/llama.cpp, and ``_compute_llama3_parameters`` of transformers.
    """
    quotients = np.array(_floats(file, ROTARY_FREQUENCIES))
    factor = float(quotients.max(initial=1.0))
    width, low, high = 2 * len(quotients), _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    base = float(settings.get("rope_theta", 10000.0))
    wavelengths = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    share = (_LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    expected = 1 / ((1 - share.clip(0, 1)) / factor + share.clip(0, 1))
    if not np.allclose(quotients, expected, rtol=1e-4):
        raise ModelLoadError(
            f"{file.path}: {ROTARY_FREQUENCIES} scales the rotary embeddings in a way that is not that of Llama 3.",
            hint="Give the model as a directory with config.json and *.safetensors.",
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3} if factor > 1 else {}


def _floats(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind.name != "F32":
        raise ModelLoadError(f"{file.path}: {name} is missing, or not stored as F32.")
    count = math.prod(tensor.shape)
    values: list[float] = np.frombuffer(file.mapped, "<f4", count=count, offset=tensor.offset).tolist()
    return values


def _own(file: GgufFile) -> dict[str, Any]:
    """Return the metadata of the architecture, without its name before each key."""
    prefix = f"{file.architecture}."
    return {key.removeprefix(prefix): _plain(value) for key, value in file.metadata.items() if key.startswith(prefix)}


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return value[0].item() if len(value) == 1 else value.tolist()
