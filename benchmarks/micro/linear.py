"""Linear layers on the CPU: PyTorch's, oneDNN's packed ones, ours in each form, as shares of the machine's ceilings.

    python benchmarks/micro/linear.py --json > benchmarks/results/linear.json
    python benchmarks/micro/linear.py --models qwen3_05b --rows 1 8 --rounds 10
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/micro/linear.py --instructions avx2

Each shape is held often enough that no cache keeps its weights. Variants run in turns; ``packed_again`` is the same code as
``packed``: their ratio is the noise floor. ``bf16_rows`` rounds rows to bfloat16, as ``onednn_bf16`` does; ``bf16`` does not. Rates are
by CPU time, of the best round, for other work can only slow a round down.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import machine
import torch
from random_models import LLAMA_110M, QWEN3_05B
from torch import nn

from trencadis_torch.linear.held import FloatWeight
from trencadis_torch.linear.native import Native, native
from trencadis_torch.linear.packed import FusedLinear, held_of, pack
from trencadis_torch.native_build import limit_instructions

MODELS = {"llama_110m": LLAMA_110M, "qwen3_05b": QWEN3_05B}
BITS = {"bf16": 16, "bf16_rows": 16, "onednn_bf16": 16, "int8": 8, "int4": 4.5}
"""Of a weight, where they are not 32."""

COLD_BYTES = 100_000_000
"""Weights of one shape together: several times what a cache holds."""


def shapes(model: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a decoder layer's products, fused, and of the output projection."""
    hidden, inner, heads = model["hidden_size"], model["intermediate_size"], model["num_attention_heads"]
    head_dim = model.get("head_dim", hidden // heads)
    wide = heads * head_dim
    return {
        "qkv": (wide + 2 * model["num_key_value_heads"] * head_dim, hidden),
        "o": (hidden, wide),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "lm_head": (model["vocab_size"], hidden),
    }


def variants(shape: tuple[int, int], library: Native) -> dict[str, list[Callable[[torch.Tensor], torch.Tensor]]]:
    """Return for each variant its layers, all of one shape."""
    copies = max(1, -(-COLD_BYTES // (4 * shape[0] * shape[1])))
    plain = [nn.Linear(shape[1], shape[0], bias=False) for _ in range(copies)]

    def held(layer: nn.Linear, native: Native | None, quantization: str = "none") -> FusedLinear:
        return pack([held_of(layer, quantization)], [None], native)

    half = [nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16) for _ in range(2 * copies)]
    packed = [held(layer, library) for layer in plain]
    found = in_onednn(half)
    return {
        "plain": list(plain),
        "onednn": [held(layer, None) for layer in plain],
        "packed": list(packed),
        # So many more as they are smaller.
        "bf16": [held(layer, library) for layer in half],
        "bf16_rows": [pack([FloatWeight(layer.weight.detach(), rounds_rows=True)], [None], library) for layer in half],
        **({"onednn_bf16": found} if found else {}),
        "int8": [held(plain[index % copies], library, "int8") for index in range(4 * copies)],
        "int4": [held(plain[index % copies], library, "int4") for index in range(7 * copies)],
        "packed_again": list(packed),
    }


def in_onednn(half: list[nn.Linear]) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return bfloat16 layers as oneDNN has them, which rounds rows to bfloat16; none where the CPU is not one for it."""
    ops = torch.ops.mkldnn

    def layer(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        blocked = ops._reorder_linear_weight(weight, 32)
        return lambda x: ops._linear_pointwise(x.bfloat16(), blocked, None, "none", [], "")

    try:
        return [layer(one.weight) for one in half]
    except RuntimeError:
        return []


def measure(
    layers: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]], x: torch.Tensor, rounds: int
) -> dict[str, list[float]]:
    """Return CPU seconds of one product in each round, rounds in turns."""
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds + 1):
        for name, copies in layers.items():
            start_s = time.process_time()
            for layer in copies:
                layer(x)
            times[name].append((time.process_time() - start_s) / len(copies))
    return {name: values[1:] for name, values in times.items()}


def rates(shape: tuple[int, int], num_rows: int, times: dict[str, list[float]], limits: dict[str, float]) -> Any:
    """Return of each variant its time, rates and shares of the ceilings, and how much quicker than plain it is."""
    found: dict[str, Any] = {}
    for name, values in times.items():
        best = min(values)
        weights = shape[0] * shape[1] * BITS.get(name, 32) / 8
        gflop = 2e-9 * num_rows * shape[0] * shape[1] / best
        read = 1e-9 * weights / best
        found[name] = {
            "best_us": round(1e6 * best, 1),
            "gflop_per_s": round(gflop, 1),
            "gb_per_s": round(read, 1),
            "share_of_reads": round(read / limits["read_gb_per_s"], 2),
            "share_of_float32_products": round(gflop / limits["float32_gflop_per_s"], 2),
            **{
                f"{other}_over_this": round(
                    statistics.median(a / b for a, b in zip(times[other], values, strict=True)), 2
                )
                for other in ("plain", "bf16")
            },
        }
    pairs = [a / b for a, b in zip(times["packed"], times["packed_again"], strict=True)]
    return {"variants": found, "a_a_ratio": round(statistics.median(pairs), 3)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--instructions", default="auto", help="as [backend.torch] has it: for ours")
    parser.add_argument("--json", action="store_true", help="the default; for the habit")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    limit_instructions(options.instructions)
    library = native()
    if library is None:
        raise SystemExit("There is no C++ compiler on this machine: nothing to measure.")
    limits, results = machine.ceilings(), []
    for model in options.models:
        for name, shape in shapes(MODELS[model]).items():
            layers = variants(shape, library)
            for num_rows in options.rows:
                times = measure(layers, torch.randn(num_rows, shape[1]), options.rounds)
                one = {"model": model, "layer": name, "shape": shape, "rows": num_rows}
                results.append({**one, **rates(shape, num_rows, times, limits)})
    about = {**machine.describe(), "instructions": options.instructions}
    print(json.dumps({"machine": about, "ceilings": limits, "results": results}, indent=1))


if __name__ == "__main__":
    main()
