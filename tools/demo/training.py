"""The training loop of the demo models: batches, schedule, distillation.

Lives here: everything between token ids and trained weights. Does not live here: text, tokenizer, files on disk, the
held-out measures (`demo.measure`).

Shape legend: B rows of a batch, T tokens of a row, V vocabulary.
"""

import copy
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo.measure import autocast, held_out_loss

MAX_POSITIONS = 2048
BATCH_TOKENS = 2048
# Mostly short rows, which are cheap; a few long ones keep every position of the context window usable.
ROW_LENGTHS = {256: 0.75, 512: 0.20, MAX_POSITIONS: 0.05}
CHAT_SHARE = 0.15
WARM_UP_STEPS = 200
FINAL_LR_SHARE = 0.02


@dataclass(frozen=True)
class Shape:
    """The size of a Llama model; query heads come two to a key-value head."""

    hidden: int
    layers: int
    heads: int
    mlp: int

    def build(self, *, vocab: int, end_id: int) -> LlamaForCausalLM:
        """Return a freshly initialised model in float32."""
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end_id,
            pad_token_id=end_id,
        )
        return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Budget:
    """When a run stops and how it learns; whichever of `steps` and `seconds` is used up first ends it.

    `distil_from` is the share of the run (0 .. 1) after which a teacher's distribution is the goal.
    """

    steps: int
    seconds: float
    learning_rate: float
    dropout: float
    distil_from: float = 1.0
    check_every_steps: int = 150


@dataclass
class TokenSource:
    """Endless rows of token ids; passages are shuffled anew for each epoch.

    `passages` and `chats` are token ids (each ends with the end token) with their weights.
    """

    passages: Sequence[tuple[list[int], float]]
    chats: Sequence[list[int]]
    rng: random.Random
    _stream: list[int] = field(default_factory=list)
    _cursor: int = 0
    epochs: int = 0

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to go on with the same rows."""
        return {"rng": self.rng.getstate(), "stream": self._stream, "cursor": self._cursor, "epochs": self.epochs}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.rng.setstate(state["rng"])
        self._stream, self._cursor, self.epochs = state["stream"], state["cursor"], state["epochs"]

    def rows(self, count: int, length: int) -> Tensor:
        """Return [count, length + 1] ids; the last column is only a target."""
        picked = [self._row(length + 1) for _ in range(count)]
        return torch.tensor(picked, dtype=torch.long)

    def _row(self, length: int) -> list[int]:
        while self._cursor + length > len(self._stream):
            self._stream = self._stream[self._cursor :] + self._epoch()
            self._cursor = 0
        # Rows share one token: it is the last target of one and the first input of the next.
        row = self._stream[self._cursor : self._cursor + length]
        self._cursor += length - 1
        return row

    def _epoch(self) -> list[int]:
        """Return one shuffled epoch, chats making up `CHAT_SHARE` of its tokens where there are any."""
        shown = [ids for ids, weight in self.passages for _ in range(int(weight + self.rng.random()))]
        wanted = CHAT_SHARE / (1.0 - CHAT_SHARE) * sum(map(len, shown))
        for ids in self.rng.sample(self.chats, len(self.chats)):
            if wanted <= 0:
                break
            shown.append(ids)
            wanted -= len(ids)
        self.rng.shuffle(shown)
        self.epochs += 1
        return [token for ids in shown for token in ids]


@dataclass
class Trained:
    """A finished run: the weights with the lowest held-out loss and how they came about."""

    model: LlamaForCausalLM
    best_step: int
    steps: int
    tokens: int
    epochs: int
    seconds: float


def train(
    model: LlamaForCausalLM,
    source: TokenSource,
    held_out: Sequence[list[int]],
    budget: Budget,
    *,
    teacher: LlamaForCausalLM | None = None,
    checkpoint: Path | None = None,
    log: Callable[[str], None] = print,
) -> Trained:
    """Train with AdamW, warm-up and cosine decay; return the best weights by held-out loss.

    Args:
        model: Trained in place, then loaded with the best weights.
        source: Training rows.
        held_out: Token ids of each held-out text.
        budget: Length and rates of the run.
        teacher: Larger model with the same vocabulary, imitated after `budget.distil_from` of the run.
        checkpoint: File the run is kept in at each check; where it is there already, the run goes on from it.
        log: Takes one line at each check.
    """
    add_dropout(model, budget.dropout)
    optimiser = make_optimiser(model, budget.learning_rate)
    watch = _Watch(model, optimiser, source, held_out, budget, checkpoint, log)
    step = watch.resume()
    while (progress := watch.progress(step)) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = budget.learning_rate * rate_share(step, progress)
        guide = teacher if progress >= budget.distil_from else None
        watch.recent_losses.append(_step(model, optimiser, _batch(source), guide))
        step += 1
        if step % budget.check_every_steps == 0:
            watch.check(step)
    watch.check(step)
    model.load_state_dict(watch.best_weights)
    return Trained(model, watch.best_step, step, step * BATCH_TOKENS, source.epochs, watch.elapsed())


@dataclass
class _Watch:
    """Looks at the held-out loss now and then during a run, and keeps the best weights and the way back."""

    model: LlamaForCausalLM
    optimiser: torch.optim.Optimizer
    source: TokenSource
    held_out: Sequence[list[int]]
    budget: Budget
    checkpoint: Path | None
    log: Callable[[str], None]
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    best_loss: float = math.inf
    best_step: int = 0
    _started: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Return seconds since the run began, without the time between two processes."""
        return time.monotonic() - self._started

    def progress(self, step: int) -> float:
        """Return the share of the budget that is used up, 0 .. 1 and over."""
        return max(step / self.budget.steps, self.elapsed() / self.budget.seconds)

    def check(self, step: int) -> None:
        """Measure the held-out loss, keep the weights if they are the best so far, write the checkpoint."""
        loss = held_out_loss(self.model, self.held_out).per_token
        recent = sum(self.recent_losses) / max(1, len(self.recent_losses))
        self.log(f"step {step} progress {self.progress(step):.3f} train {recent:.3f} held-out {loss:.4f}")
        if loss < self.best_loss or not self.best_weights:
            self.best_loss, self.best_step = loss, step
            self.best_weights = copy.deepcopy(self.model.state_dict())
        if self.checkpoint is not None:
            fresh = self.checkpoint.with_suffix(".new")
            torch.save(self._state(step), fresh)
            fresh.replace(self.checkpoint)

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "elapsed": self.elapsed(),
            "weights": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "source": self.source.state(),
            "best": (self.best_weights, self.best_loss, self.best_step),
        }

    def resume(self) -> int:
        """Take up the checkpoint, where there is one; return the step to go on with."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return 0
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.source.restore(state["source"])
        self.best_weights, self.best_loss, self.best_step = state["best"]
        self._started -= state["elapsed"]
        return int(state["step"])


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Drop parts of each block's output while training; Llama has no such option of its own, hooks add it."""

    def drop(module: nn.Module, _: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (functional.dropout(output[0], rate, module.training), *output[1:])
        return functional.dropout(output, rate, module.training)

    if rate > 0.0:
        model.model.embed_tokens.register_forward_hook(drop)
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(drop)
            layer.mlp.register_forward_hook(drop)


def _batch(source: TokenSource) -> Tensor:
    length = source.rng.choices(list(ROW_LENGTHS), list(ROW_LENGTHS.values()))[0]
    return source.rows(BATCH_TOKENS // length, length)


def _step(
    model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, rows: Tensor, teacher: LlamaForCausalLM | None
) -> float:
    """Take one optimiser step on rows [B, T + 1]; return the loss."""
    model.train()
    inputs, targets = rows[:, :-1], rows[:, 1:]
    with autocast(enabled=True):
        logits = model(input_ids=inputs, use_cache=False).logits
    logits = logits.float().flatten(0, 1)
    if teacher is None:
        loss = functional.cross_entropy(logits, targets.flatten())
    else:
        loss = _divergence(logits, teacher, inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return float(loss.detach())


def _divergence(logits: Tensor, teacher: LlamaForCausalLM, inputs: Tensor) -> Tensor:
    """Return KL(teacher || student) for student logits [B * T, V].

    Source: Hinton et al. 2015, section 2, at temperature 1: acceptance of drafts is decided at that temperature.
    """
    with torch.no_grad(), autocast(enabled=True):
        goal = teacher(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
    return functional.kl_div(logits.log_softmax(-1), goal.log_softmax(-1), log_target=True, reduction="batchmean")


def make_optimiser(model: LlamaForCausalLM, rate: float) -> torch.optim.AdamW:
    """Return the optimiser of the demo models: weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def rate_share(step: int, progress: float) -> float:
    """Return the share of the peak rate (0 .. 1): linear warm-up, then cosine over the run."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (FINAL_LR_SHARE + (1.0 - FINAL_LR_SHARE) * cosine)
