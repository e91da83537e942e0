"""Highest memory and CPU seconds of loading a checkpoint of 7 B parameters, by the command that users run.

    python benchmarks/micro/loading.py --write /data/7b              # 13.5 GB: Llama 2's shapes in bfloat16, five shards, no meaning
    python benchmarks/micro/loading.py --model /data/7b --json       # int4, then int8: trencadis generate, a process for each

The highest memory is that of the process with the most, its pages of the mapped files counted (``ru_maxrss``). Weights are pieces of one
block of random numbers, so that nothing else than writing takes time.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
NUM_SHARDS = 5
BLOCK = 1 << 24
"""Random numbers that there are."""


def weights(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a checkpoint's weights. Pure."""
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(shape["num_hidden_layers"]):
        for name, size in (
            ("input_layernorm", (hidden,)),
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("post_attention_layernorm", (hidden,)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            yield f"model.layers.{layer}.{name}.weight", size
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def write(directory: Path, shape: dict[str, Any]) -> None:
    """Write a checkpoint with the demo model's tokenizer."""
    shutil.copytree(str(importlib.resources.files("trencadis") / "demo" / "target"), directory, dirs_exist_ok=True)
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    (directory / "config.json").write_text(json.dumps(shape))
    random = (np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32) * 0.02).view(np.uint32)
    block, one = (random >> 16).astype(np.uint16), np.full(BLOCK, 0x3F80, np.uint16)  # the upper half is the bfloat16
    names = list(weights(shape))
    each = -(-len(names) // NUM_SHARDS)
    shards = [names[first : first + each] for first in range(0, len(names), each)]
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        index.update({name: file for name, _ in shard})
        _write_shard(directory / file, shard, block, one)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]], block: Any, one: Any) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, size in shard:
        num_bytes = 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (_, size) in enumerate(shard):
            left, first = int(np.prod(size)), number * 65_537 % BLOCK
            while left:
                piece = (one if len(size) == 1 else block)[first : first + left]
                file.write(piece.tobytes())
                left, first = left - len(piece), 0


def load(model: Path, quantization: str) -> dict[str, Any]:
    """Generate a token with a model in a process of its own; returns what that took."""
    command = [sys.executable, "-m", "trencadis", "generate", "--model.path", str(model)]
    command += ["--backend.torch.quantization", quantization, "--max-tokens", "1", "The old man"]
    child = os.posix_spawn(sys.executable, command, {**os.environ})
    _, status, used = os.wait4(child, 0)
    return {
        "quantization": quantization,
        "exit": os.waitstatus_to_exitcode(status),
        "highest_mib": round(used.ru_maxrss / 1024),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="directory of a checkpoint to write")
    parser.add_argument("--model", type=Path, help="directory of a checkpoint to load")
    parser.add_argument("--quantizations", nargs="*", default=["int4", "int8"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    if asked.write:
        write(asked.write, SHAPE)
    if asked.model:
        size = sum(file.stat().st_size for file in asked.model.glob("*.safetensors"))
        found = {"files_mib": round(size / 2**20), "loads": [load(asked.model, one) for one in asked.quantizations]}
        print(json.dumps(found, indent=2) if asked.json else found)


if __name__ == "__main__":
    main()
