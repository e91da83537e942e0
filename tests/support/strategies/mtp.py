"""Tiny random models with an MTP layer in the published layout, and what it drafts by a slow reference in float64."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["NUM_LAYERS", "reference_drafts", "reference_logprobs", "save_mtp"]

NUM_LAYERS = 3
_HIDDEN, _EPS = 32, 1e-5
_MIXTURE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True, **_MIXTURE},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        **_MIXTURE,
    },
}


def save_mtp(
    path: Path,
    kind: str = "glm4_moe",
    *,
    num_shards: int = 1,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
    **settings: Any,
) -> Path:
    """Write a random model whose greedy tokens are never nearly equally likely, with one MTP layer; returns the path.

    Args:
        path: Directory.
        kind: Family.
        num_shards: Files of weights.
        change: Called with tensors before they are written.
        settings: More of config.json.
    """
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=_HIDDEN,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS + 1,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.4,
        rms_norm_eps=_EPS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        **_FAMILIES[kind],
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, tensor in model.state_dict().items():
            if "norm" in name or "correction" in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
        model.save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        place = f"model.layers.{NUM_LAYERS}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{place}.{name}.weight"] = 1 + torch.randn(_HIDDEN) * 0.3
        tensors[f"{place}.eh_proj.weight"] = torch.randn(_HIDDEN, 2 * _HIDDEN) * 0.3
    tensors[f"{place}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{place}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if change is not None:
        change(tensors)
    names = sorted(tensors)
    files = {f"model-{i + 1:05}-of-{num_shards:05}.safetensors": names[i::num_shards] for i in range(num_shards)}
    if num_shards == 1:
        files = {"model.safetensors": names}
    else:
        (path / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, path / file, metadata={"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    written |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1} | settings
    (path / "config.json").write_text(json.dumps(written))
    return path


def reference_drafts(path: Path, tokens: Sequence[int], count: int) -> list[int]:
    """Return what an MTP layer drafts after all of ``tokens``, computed in float64, the whole text at once for each draft.

    Args:
        path: The model.
        tokens: Known; the hidden state of the last one is not.
        count: How many drafts.
    """
    found: list[int] = []
    for _ in range(count):
        found.append(int(reference_logprobs(path, tokens, found).argmax()))
    return found


@torch.no_grad()
def reference_logprobs(path: Path, tokens: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
    """Return an MTP layer's log-probabilities of the token after ``tokens`` and some drafts, float64 ``[V]``.

    The layer is taken from the same files read as those of a model with one layer more.

    Args:
        path: The model.
        tokens: Known; the hidden state of the last one is not.
        drafts: They follow each other; the layer reads its own hidden states there.
    """
    main, longer, weights = _opened(path)

    def of(name: str) -> torch.Tensor:
        return weights[f"model.layers.{NUM_LAYERS}.{name}.weight"].double()

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + _EPS).sqrt() * of(name)

    hidden = main.model(torch.tensor([list(tokens[:-1])])).last_hidden_state
    known = [*tokens, *drafts]
    while True:
        size = hidden.shape[1]
        embedded = of("embed_tokens")[torch.tensor([known[1 : 1 + size]])]
        x = torch.cat([normed(embedded, "enorm"), normed(hidden, "hnorm")], -1) @ of("eh_proj").T
        mask = torch.full((1, 1, size, size), float("-inf"), dtype=torch.float64).triu(1)
        angles = longer.rotary_emb(x, torch.arange(size)[None])
        made = longer.layers[NUM_LAYERS](x, attention_mask=mask, position_embeddings=angles)
        last = normed(made[:, -1:], "shared_head.norm")
        if size + 1 == len(known):
            return (last[0, 0] @ of("shared_head.head").T).log_softmax(-1)
        hidden = torch.cat([hidden, last], 1)


@functools.lru_cache(maxsize=2)
def _opened(path: Path) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Return a model, one with a layer more, and the weights of the files."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    models = []
    for num_layers in (NUM_LAYERS, NUM_LAYERS + 1):
        config = AutoConfig.from_pretrained(path, num_hidden_layers=num_layers)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float64, attn_implementation="eager"
        )
        model.set_experts_implementation("eager")
        models.append(model.eval())
    weights = {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}
    return models[0], models[1].model, weights
