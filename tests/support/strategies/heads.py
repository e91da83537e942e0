"""Tiny random heads in the published formats, and what they draft by a slow reference in float64."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

__all__ = ["DRAFT_VOCAB", "HIDDEN", "STATES", "reference_drafts", "reference_logprobs", "save_head", "save_verifier"]

VOCAB, HIDDEN, WIDE, HEADS, KV_HEADS, DIM = 97, 32, 48, 4, 2, 8
DRAFT_VOCAB = 61
STATES = (1, 2, 3)
_EPS = 1e-5


def save_verifier(
    path: Path, *, num_layers: int = 4, kind: str = "llama", seed: int = 3, tie_word_embeddings: bool = False
) -> Path:
    """Write a random model whose greedy tokens are never nearly equally likely; returns the path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=256,
        initializer_range=0.4,
        rms_norm_eps=_EPS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=tie_word_embeddings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).eval().save_pretrained(path)
    return path


def save_head(path: Path, *, own_format: bool = False, seed: int = 5, change: Any = None, **settings: Any) -> Path:
    """Write a random head of the verifier above.

    Args:
        path: Directory.
        own_format: As EAGLE publishes it, without embeddings; else that of speculators, with its own.
        seed: Of the weights.
        change: Called with tensors before they are written.
        settings: More of the configuration.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    layer = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "hidden_act": "silu",
        "rms_norm_eps": _EPS,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }
    config: dict[str, Any] = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": list(STATES)}
    if own_format:
        config |= layer | {"architectures": ["LlamaForCausalLMEagle3"]}
    else:
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": layer,
        }
    (path / "config.json").write_text(json.dumps(config | settings))
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    place = "midlayer" if own_format else "layers.0"
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors = {
        "fc.weight": drawn(HIDDEN, len(STATES) * HIDDEN),
        "norm.weight": 1 + drawn(HIDDEN),
        "lm_head.weight": drawn(DRAFT_VOCAB, HIDDEN),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.isin(torch.arange(VOCAB), ids),
        f"{place}.self_attn.q_proj.weight": drawn(HEADS * DIM, 2 * HIDDEN),
        f"{place}.self_attn.k_proj.weight": drawn(KV_HEADS * DIM, 2 * HIDDEN),
        f"{place}.self_attn.v_proj.weight": drawn(KV_HEADS * DIM, 2 * HIDDEN),
        f"{place}.self_attn.o_proj.weight": drawn(HIDDEN, HEADS * DIM),
        f"{place}.mlp.gate_proj.weight": drawn(WIDE, HIDDEN),
        f"{place}.mlp.up_proj.weight": drawn(WIDE, HIDDEN),
        f"{place}.mlp.down_proj.weight": drawn(HIDDEN, WIDE),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{place}.{name}.weight"] = 1 + drawn(HIDDEN)
    if not own_format:
        tensors["embed_tokens.weight"] = drawn(VOCAB, HIDDEN)
    if change is not None:
        change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def reference_drafts(verifier: Path, head: Path, tokens: Sequence[int], count: int) -> list[int]:
    """Return what a head drafts after all of ``tokens``, computed in float64, the whole text at once for each draft.

    Args:
        verifier: The model.
        head: Its head.
        tokens: Known; the hidden state of the last one is not.
        count: How many drafts.
    """
    found: list[int] = []
    for _ in range(count):
        found.append(int(reference_logprobs(verifier, head, tokens, found).argmax()))
    return found


@torch.no_grad()
def reference_logprobs(verifier: Path, head: Path, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """Return a head's log-probabilities of the token after ``tokens`` and the drafts ``path``, float64 ``[V]``.

    Args:
        verifier: The model.
        head: Its head.
        tokens: Known; the hidden state of the last one is not.
        path: Drafts that follow each other; the head reads its own hidden states there.
    """
    model, config, weights = _loaded(verifier, head)
    keeps_normed = config.get("norm_before_residual", "speculators_model_type" in config)
    states = model(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
    hidden = (
        torch.cat([states[layer][0] for layer in config["eagle_aux_hidden_state_layer_ids"]], -1)
        @ weights["fc.weight"].T
    )
    embeddings = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
    following = list(tokens[1:])
    logits, made = _next(weights, hidden, embeddings[torch.tensor(following)], keeps_normed=keeps_normed)
    for draft in path:
        following.append(draft)
        hidden = torch.cat([hidden, made[None]])
        logits, made = _next(weights, hidden, embeddings[torch.tensor(following)], keeps_normed=keeps_normed)
    found = torch.full((VOCAB,), float("-inf"), dtype=torch.float64)
    found[torch.arange(len(logits)) + weights["d2t"]] = logits.log_softmax(-1)
    return found


@functools.lru_cache(maxsize=2)
def _loaded(verifier: Path, head: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """Return a model, the configuration of its head and that one's weights, in float64."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float64, attn_implementation="eager").eval()
    weights = {
        name.replace("midlayer.", "layers.0."): one.double() if one.is_floating_point() else one
        for name, one in load_file(head / "model.safetensors").items()
    }
    return model, json.loads((head / "config.json").read_text()), weights


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + _EPS).sqrt() * weight


def _next(
    weights: dict[str, torch.Tensor], hidden: torch.Tensor, embedded: torch.Tensor, *, keeps_normed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of draft tokens after a text and the head's own hidden state at its last position."""

    def of(name: str) -> torch.Tensor:
        return weights[f"layers.0.{name}.weight"]

    normed = _norm(hidden, of("hidden_norm"))
    x = torch.cat([_norm(embedded, of("input_layernorm")), normed], -1)
    size = len(x)
    angles = torch.arange(size)[:, None] / 10000.0 ** (torch.arange(0, DIM, 2).double() / DIM)
    cosines, sines = angles.cos(), angles.sin()

    def turned(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads[..., : DIM // 2], heads[..., DIM // 2 :]
        c, s = cosines[:, None], sines[:, None]
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    queries = turned((x @ of("self_attn.q_proj").T).view(size, HEADS, DIM))
    keys = turned((x @ of("self_attn.k_proj").T).view(size, KV_HEADS, DIM)).repeat_interleave(HEADS // KV_HEADS, 1)
    values = (x @ of("self_attn.v_proj").T).view(size, KV_HEADS, DIM).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("hd,shd->hs", queries[-1], keys) * DIM**-0.5
    attended = torch.einsum("hs,shd->hd", scores.softmax(-1), values).flatten()
    made = (normed if keeps_normed else hidden)[-1] + attended @ of("self_attn.o_proj").T
    y = _norm(made, of("post_attention_layernorm"))
    made = made + (functional.silu(y @ of("mlp.gate_proj").T) * (y @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    return _norm(made, weights["norm.weight"]) @ weights["lm_head.weight"].T, made
