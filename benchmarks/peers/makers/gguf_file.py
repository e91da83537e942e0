"""Writes a GGUF file, F32, BF16, Q8_0 or Q4_0, from a directory of transformers. Runs where ``gguf`` and ``safetensors`` are installed.

The vocabulary in the file is made up: prompts are token ids, and nothing is decoded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Return what GGUF calls a tensor of transformers.

    Raises:
        KeyError: A tensor that no decoder of this benchmark has.
    """
    plain = name.removeprefix("model.").removesuffix(".weight")
    if plain in ("embed_tokens", "norm"):
        return {"embed_tokens": "token_embd", "norm": "output_norm"}[plain] + ".weight"
    _, number, rest = plain.split(".", 2)
    return f"blk.{number}.{NAMES[rest]}.weight"


def interleaved(weight: Any, num_heads: int) -> Any:
    """Return the rows of a query or key projection in the order that llama.cpp rotates: pairs next to each other, not halves."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tensors_of(directory: Path, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from safetensors.numpy import load_file

    for file in sorted(directory.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
                yield gguf_name(name), interleaved(weight, config[heads])
            else:
                yield gguf_name(name), weight


def add_vocabulary(writer: Any, size: int) -> None:
    from gguf import TokenType

    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    tokens += [f"t{index}" for index in range(len(tokens), size)]
    types += [TokenType.NORMAL] * (size - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def make(source: str, target: str, precision: str) -> None:
    import gguf

    directory = Path(source)
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(target, config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kind = getattr(gguf.GGMLQuantizationType, KINDS[precision])
    writer.add_file_type(
        getattr(gguf.LlamaFileType, "ALL_F32" if precision == "fp32" else f"MOSTLY_{KINDS[precision]}")
    )
    add_vocabulary(writer, config["vocab_size"])
    for name, weight in tensors_of(directory, config):
        if precision != "fp32" and weight.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    make(*sys.argv[1:4])
