"""Sizes of a decoder that its step times depend on, from its ``config.json``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

import attrs

from trencadis.api import resolve_model_path
from trencadis.errors import ConfigError
from trencadis.files import read_json

__all__ = ["ModelSizes", "read_model_sizes"]

_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}


@attrs.frozen(kw_only=True)
class ModelSizes:
    """A decoder with gated feed-forward networks, of experts or not.

    Attributes:
        num_layers: L.
        hidden_size: d.
        num_heads: Query heads of a layer.
        num_kv_heads: KV heads of a layer.
        head_size: Numbers of a head.
        ffn_size: Width of a layer's feed-forward network, where it has no experts.
        num_expert_layers: Layers with experts.
        num_experts: Number of experts of such a layer.
        num_routes: Experts that compute a token.
        expert_size: Width of an expert.
        shared_expert_size: Width of the experts that compute every token, together.
        dtype: Data type of weights: names the peak of the device.
        weight_bytes: Size of one weight, in bytes.
        activation_bytes: Size of one number of activations and of the KV cache, in bytes.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    num_expert_layers: int = 0
    num_experts: int = 0
    num_routes: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    dtype: str = "bfloat16"
    weight_bytes: float = 2.0
    activation_bytes: float = 2.0

    @property
    def attention_weights(self) -> int:
        """Weights of the projections of a layer's attention: queries, keys, values, outputs."""
        return 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)

    @property
    def is_mixed(self) -> bool:
        """Whether some layers have experts and others do not."""
        return 0 < self.num_expert_layers < self.num_layers


def read_model_sizes(name: str) -> ModelSizes:
    """Return the sizes of a model.

    Args:
        name: One of ``models.toml`` such as ``llama_3_1_8b``, a directory with ``config.json``, that file, or ``demo``.

    Raises:
        ConfigError: There is no such model, or its configuration lacks a size; names it.
    """
    known = tomllib.loads(resources.files(__package__).joinpath("models.toml").read_text(encoding="utf-8"))
    if name in known:
        return _sizes(known[name], name)
    path = Path(resolve_model_path(name)).expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is no model whose sizes are known: {error}.",
            hint=f"Name a directory with config.json, or one of {', '.join(known)}.",
        ) from error
    return _sizes(config.get("text_config", config), name)


def _sizes(config: Mapping[str, Any], name: str) -> ModelSizes:
    """Return sizes by the names that transformers gives them."""
    try:
        num_layers, hidden_size = int(config["num_hidden_layers"]), int(config["hidden_size"])
        num_heads, ffn_size = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the configuration of {name!r} has no {error} that is a number.",
            hint="Step times by data sheet are for decoders with the names of Llama's config.json.",
        ) from error
    num_experts = int(
        config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    )
    expert_size = int(config.get("moe_intermediate_size") or ffn_size) if num_experts else 0
    num_shared = int(config.get("n_shared_experts") or 0)
    dtype, weight_bytes, activation_bytes = _types(config)
    return ModelSizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_size=int(config.get("head_dim") or hidden_size // num_heads),
        ffn_size=ffn_size,
        num_expert_layers=_num_expert_layers(config, num_layers) if num_experts else 0,
        num_experts=num_experts,
        num_routes=int(config.get("num_experts_per_tok") or 1) if num_experts else 0,
        expert_size=expert_size,
        shared_expert_size=int(config.get("shared_expert_intermediate_size") or num_shared * expert_size),
        dtype=dtype,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
    )


def _num_expert_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Return how many layers have experts, by the rules of DeepSeek, Qwen and Llama 4. Pure."""
    step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
    dense = {*range(int(config.get("first_k_dense_replace") or 0)), *(config.get("mlp_only_layers") or ())}
    return sum(1 for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def _types(config: Mapping[str, Any]) -> tuple[str, float, float]:
    """Return the type of weights as sheets name it, and bytes of a weight and of an activation. Pure."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    quantization = config.get("quantization_config") or {}
    method = str(quantization.get("quant_method") or "")
    if "fp8" in method or "float" in str(quantization.get("format") or ""):
        return "float8", 1.0, _BYTES.get(dtype, 2.0)
    bits = quantization.get("bits")
    return dtype, float(bits) / 8 if bits else _BYTES.get(dtype, 2.0), _BYTES.get(dtype, 2.0)
