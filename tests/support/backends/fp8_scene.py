"""Exact rounding to fp8, measurements in the vendor's format, and a model whose next token is clear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from support.backends import tiny_models

LARGEST = {"Gaudi 2": 240.0, "Gaudi 3": 448.0}


def numbers(largest: float = 240.0) -> list[float]:
    """Return the numbers of float8_e4m3fn from zero up to the largest of a device, by their bits. Pure."""
    found = []
    for bits in range(127):  # 127 is no number
        exponent, mantissa = bits >> 3, bits & 7
        found.append(mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return [number for number in found if number <= largest]


def rounded(values: NDArray[Any], largest: float = 240.0) -> NDArray[np.float64]:
    """Return each value as the nearest number of float8_e4m3fn, the one with even bits of two; saturated. Pure."""
    known = numbers(largest)

    def one(value: float) -> float:
        size = abs(value)
        best = min(range(len(known)), key=lambda bits: (abs(known[bits] - size), bits % 2))
        return float(np.copysign(known[best], value))

    return np.array([one(float(value)) for value in values.ravel()]).reshape(values.shape)


@torch.inference_mode()
def measure(model: Any, tokens: torch.Tensor, path: Path, *, caches: bool = False) -> Path:
    """Write what Intel Neural Compressor measures of a model's linear layers on a prompt, as its JSON."""
    nodes: dict[str, Any] = {}

    def note(name: str, kind: str, value: torch.Tensor) -> None:
        node = nodes.setdefault(name, {"inputs": [[[0.0]]]})
        node[kind] = [[[max(node["inputs"][0][0][0], float(value.abs().max()))]]]

    handles = []
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            nodes[name] = {"inputs": [[[0.0]]], "params": {"weight": [[float(part.weight.abs().max())]]}}
            handles.append(part.register_forward_hook(lambda _, args, __, name=name: note(name, "inputs", args[0])))
        if caches and name.endswith(("k_proj", "v_proj")):
            cache = f"{name.rpartition('.')[0]}.attn.impl.{name[-6]}_cache"
            handles.append(part.register_forward_hook(lambda _, __, out, name=cache: note(name, "inputs", out)))
    model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    content = {"GlobalRank": None, "LocalRank": 0, "Mode": "DynamicRange", "Nodes": nodes}
    target = path.with_name(f"{path.name}_hooks_maxabs_0_1.json")
    target.write_text(json.dumps(content))
    return target


def clear_model(kind: str = "llama") -> Any:
    """Return a tiny model that says the next token loudly: its output layer is its embedding, in another order."""
    model = tiny_models.make_model(kind)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
            elif "bias" in name:
                parameter.zero_()
        table = torch.randn(model.get_input_embeddings().weight.shape, generator=generator)
        model.get_input_embeddings().weight.copy_(table)
        order = 3 + torch.randperm(len(table) - 3, generator=generator)
        head = model.get_output_embeddings().weight
        head.zero_()
        head[order] = table[3:] * 0.3
    return model


def save_clear_model(directory: Path, kind: str = "llama") -> Path:
    """Write that model and return its path."""
    clear_model(kind).save_pretrained(directory / f"clear_{kind}")
    return directory / f"clear_{kind}"
