"""An EAGLE-3 head while it is trained: one layer over hidden states of the target, unrolled over its own drafts.

Lives here: the head, what it learns from, its loop, its files. Does not live here: the target's answers (`demo.answers`).

Shape legend: B rows of a batch, T tokens of a row, S hidden states side by side, H hidden size, N heads, D head dimension,
C candidates that are kept of a distribution, V draft vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from demo.answers import CANDIDATES, GOAL_TEMPERATURE
from demo.measure import autocast
from demo.training import MAX_POSITIONS, Budget, make_optimiser, rate_share

STATE_LAYERS = (1, 3, 4)
"""Layers of the target whose inputs the head reads: a low, a middle and a high one of five."""
ROW_LENGTH = 512
BATCH_ROWS = 2
UNROLLED = 4
STEP_SHARE = 0.8
"""A later draft's loss counts this much of the one's before. Source: the code of Li et al., "EAGLE-3", arXiv 2503.01840."""


@dataclass(frozen=True)
class Batch:
    """Some rows: tokens [B, T], the target's hidden states [B, T, S], its likeliest tokens after each [B, T, C], their logits."""

    inputs: Tensor
    states: Tensor
    candidates: Tensor
    logits: Tensor


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, heads = config.head_dim, config.num_attention_heads
        kv_size = config.num_key_value_heads * size
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))


class EagleHead(nn.Module):
    """The head with weights under the names of `speculators`; tokens are embedded by the target.

    Args:
        target: Lends embeddings and sizes, and the first weights of the output projection.
        target_ids: The token of each draft token, int64 [V], ascending.
        mlp: Size of the MLP.
    """

    def __init__(self, target: LlamaForCausalLM, target_ids: Tensor, *, mlp: int) -> None:
        super().__init__()
        like = target.config
        self.config = LlamaConfig(
            vocab_size=like.vocab_size,
            hidden_size=like.hidden_size,
            intermediate_size=mlp,
            num_hidden_layers=1,
            num_attention_heads=like.num_attention_heads,
            num_key_value_heads=like.num_key_value_heads,
            head_dim=like.hidden_size // like.num_attention_heads,
            rms_norm_eps=like.rms_norm_eps,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=None,
            eos_token_id=like.eos_token_id,
            pad_token_id=like.pad_token_id,
        )
        size = like.hidden_size
        self.fc = nn.Linear(len(STATE_LAYERS) * size, size, bias=False)
        self.layers = nn.ModuleList([_Layer(self.config)])
        self.norm = LlamaRMSNorm(size, eps=self.config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(target_ids), bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        embeddings = target.get_input_embeddings().weight.detach()
        with torch.no_grad():
            self.lm_head.weight.copy_(embeddings[target_ids])
        self.target_ids = target_ids
        self._embeddings = embeddings
        self._angles = LlamaRotaryEmbedding(self.config)

    def unrolled(self, states: Tensor, tokens: Tensor, count: int) -> list[Tensor]:
        """Return the logits of so many drafts after one another, [B, T, V] each.

        The k-th of them stands at the position of the token that it follows, where the k - 1 tokens before are drafts: the head
        reads its own hidden states there, and those of the target before.

        Args:
            states: Hidden states of tokens, [B, T, S].
            tokens: The token after each, [B, T].
            count: Drafts.
        """
        layer, embedded = self.layers[0], functional.embedding(tokens, self._embeddings)
        embedded = layer.input_layernorm(embedded)
        angles = self._angles(embedded, torch.arange(tokens.shape[1])[None])
        hidden, found, before = self.fc(states), list[Tensor](), list[tuple[Tensor, Tensor]]()
        for _ in range(count):
            residual = layer.hidden_norm(hidden)
            queries, keys, values = self._heads(torch.cat([embedded, residual], -1), angles)
            before.append((keys, values))
            hidden = residual + layer.self_attn.o_proj(_attend(queries, before))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(self.lm_head(self.norm(hidden)))
            hidden = _later(hidden, 1, dim=1)
        return found

    def _heads(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, N, T, D], keys and values once for each query head."""
        attention, size = self.layers[0].self_attn, self.config.head_dim
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        made = [part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in parts]
        queries, keys = apply_rotary_pos_emb(made[0], made[1], *angles)
        groups = queries.shape[1] // keys.shape[1]
        return queries, keys.repeat_interleave(groups, 1), made[2].repeat_interleave(groups, 1)


def _later(x: Tensor, count: int, *, dim: int) -> Tensor:
    """Return what stood so many places before along a dimension, zeros at the start."""
    if not count:
        return x
    gap = torch.zeros_like(x.narrow(dim, 0, count))
    return torch.cat([gap, x.narrow(dim, 0, x.shape[dim] - count)], dim)


def _attend(queries: Tensor, before: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return attention's output [B, T, N D] of the last unrolled step.

    A query at i of step k sees the first step's keys up to i - k, and of each later step j the one at i - k + j.

    Args:
        queries: [B, N, T, D].
        before: Keys and values of each step, its own the last.
    """
    length, last = queries.shape[2], len(before) - 1
    queries = queries * queries.shape[-1] ** -0.5
    sees = torch.ones(length, length, dtype=torch.bool).tril(-last)
    scores = [(queries @ before[0][0].transpose(-1, -2)).masked_fill(~sees, -1e4)]
    own = [[_later(part, last - j, dim=2) for part in before[j]] for j in range(1, last + 1)]
    scores += [(queries * keys).sum(-1, keepdim=True) for keys, _ in own]
    shares = torch.cat(scores, -1).float().softmax(-1).to(queries.dtype)
    made = shares[..., :length] @ before[0][1]
    for j, (_, values) in enumerate(own):
        made = made + shares[..., length + j, None] * values
    return made.transpose(1, 2).flatten(2)


def frequent_tokens(texts: Sequence[list[int]], count: int) -> tuple[Tensor, float]:
    """Return the most frequent tokens of some texts, ascending, and the share of the texts that they are."""
    tally = Counter(token for text in texts for token in text)
    chosen = sorted(token for token, _ in tally.most_common(count))
    return torch.tensor(chosen), sum(tally[token] for token in chosen) / sum(tally.values())


@torch.no_grad()
def observe(target: LlamaForCausalLM, texts: Sequence[list[int]], *, seed: int) -> list[Batch]:
    """Return rows of shuffled texts, put one after another, with what the target computes and says there."""
    shuffled = random.Random(seed).sample(list(texts), len(texts))
    stream = torch.tensor([token for text in shuffled for token in text])
    size, batches = BATCH_ROWS * ROW_LENGTH, []
    for inputs in stream[: len(stream) // size * size].view(-1, BATCH_ROWS, ROW_LENGTH):
        made = target(input_ids=inputs, use_cache=False, output_hidden_states=True)
        states = torch.cat([made.hidden_states[layer] for layer in STATE_LAYERS], -1)
        top = made.logits.float().topk(CANDIDATES, dim=-1)
        batches.append(Batch(inputs.short(), states.bfloat16(), top.indices.short(), top.values.half()))
    return batches


def train_head(
    head: EagleHead, batches: Sequence[Batch], budget: Budget, *, seed: int, log: Callable[[str], None]
) -> tuple[int, float]:
    """Train a head to draft what the target says; return the number of steps and the seconds they took.

    Args:
        head: Trained in place.
        batches: Shown in a new order each round.
        budget: Its steps, seconds and learning rate.
        seed: Seed of the orders.
        log: Gets a line now and then.
    """
    optimiser = make_optimiser(head, budget.learning_rate)
    place = torch.full((head.config.vocab_size,), -1)
    place[head.target_ids] = torch.arange(len(head.target_ids))
    started, step, losses = time.monotonic(), 0, list[list[float]]()
    while (progress := max(step / budget.steps, (time.monotonic() - started) / budget.seconds)) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = budget.learning_rate * rate_share(step, progress)
        turn, index = divmod(step, len(batches))
        order = random.Random(f"{seed}:{turn}").sample(range(len(batches)), len(batches))
        losses.append(_step(head, optimiser, batches[order[index]], place))
        step += 1
        if step % budget.check_every_steps == 0:
            means = " ".join(f"{sum(some) / len(some):.4f}" for some in zip(*losses, strict=True))
            log(f"step {step} progress {progress:.3f} loss {means}")
            losses.clear()
    return step, time.monotonic() - started


def _step(head: EagleHead, optimiser: torch.optim.Optimizer, batch: Batch, place: Tensor) -> list[float]:
    """Take one optimiser step; return each draft's cross entropy against the target's sharpened candidates, nats per token."""
    inputs, goal = batch.inputs.long(), (batch.logits[:, 1:].float() / GOAL_TEMPERATURE).softmax(-1)
    # What the head cannot say is no goal.
    candidates = place[batch.candidates[:, 1:].long()]
    goal = goal * (candidates >= 0)
    with autocast(enabled=True):
        said = head.unrolled(batch.states[:, :-1], inputs[:, 1:], UNROLLED)
    losses = []
    for k, logits in enumerate(said):
        logprobs = logits[:, k:].float().log_softmax(-1).gather(-1, candidates[:, k:].clamp(min=0))
        losses.append(-(goal[:, k:] * logprobs).sum(-1).mean())
    torch.stack([STEP_SHARE**k * loss for k, loss in enumerate(losses)]).sum().backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return [float(loss.detach()) for loss in losses]


def save_head(head: EagleHead, out: Path) -> None:
    """Write a head as `speculators` does, in bfloat16, then put it in place at once: a reader never sees half of it."""
    fresh, old = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("new", "old"))
    fresh.mkdir(parents=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[head.target_ids] = True
    weights |= {"d2t": head.target_ids - torch.arange(len(head.target_ids)), "t2d": known}
    save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
    (fresh / "config.json").write_text(json.dumps(_config(head), indent=2) + "\n", encoding="utf-8")
    for path in fresh.iterdir():
        path.chmod(0o644)  # package data is for everyone
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _config(head: EagleHead) -> dict[str, object]:
    layer = head.config
    kept = ("attention_bias", "hidden_act", "hidden_size", "head_dim", "intermediate_size", "max_position_embeddings")
    kept += (
        "mlp_bias",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
    )
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": len(head.target_ids),
        "eagle_aux_hidden_state_layer_ids": list(STATE_LAYERS),
        "norm_before_residual": True,
        "speculators_model_type": "eagle3",
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",
            **{name: getattr(layer, name) for name in kept},
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
