"""Teach a model to guess several tokens in one forward, from mask tokens after the text.

Lives here: the mask token, the layout of a training row, the loop. Does not live here: lessons, measures, files.

    text  x0 x1 .. xT | masks one after each kept position | masks two after | ..

Source: PARD, arXiv 2504.18583, section 3: one mask token for all depths, and conditional drop: a position that is
kept at a depth was kept at all depths before, because a mask sees the masks before it.

Shape legend: B rows of a batch, T tokens of a row, L tokens and masks of a training row, C candidates, V vocabulary.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from demo.lessons import Lesson
from demo.measure import autocast
from demo.training import Budget, make_optimiser, rate_share

KEEP_SHARE = 0.7
# Between the target's distribution (1) and its first choice (0): a draft is judged by its first choice.
GOAL_TEMPERATURE = 0.5


def add_mask_token(model: LlamaForCausalLM) -> int:
    """Give the model one token more, the mask token, as the mean of the others; return its id.

    The id is written to the model's configuration as `mask_token_id`.
    """
    mask_id = int(model.config.vocab_size)
    model.resize_token_embeddings(mask_id + 1, mean_resizing=False)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[mask_id] = table[:mask_id].mean(0)
    model.config.mask_token_id = mask_id
    return mask_id


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a training row stand, the text first.

    `anchors` [L] is the position each continues (a token of the text: its own), `depths` [L] how many masks it is
    after it (a token of the text: 0).
    """

    anchors: Tensor
    depths: Tensor

    @property
    def sees(self) -> Tensor:
        """Which token [L, L] (row) attends to which (column): the text up to its anchor, and its own masks."""
        anchor, depth = self.anchors[:, None], self.depths[:, None]
        text = (self.depths == 0) & (self.anchors <= anchor)
        return text | ((self.anchors == anchor) & (self.depths <= depth))


def lay_out(length: int, depth: int, rng: torch.Generator) -> Layout:
    """Return the layout of a text of `length` tokens with guesses up to `depth` tokens ahead.

    `KEEP_SHARE` of the positions that have a mask at one depth have one at the next, drawn at random.
    """
    order = torch.randperm(length, generator=rng)
    kept = (order[: math.ceil(length * KEEP_SHARE**step)] for step in range(1, depth))
    anchors = [torch.arange(length), *kept]
    depths = [torch.full_like(some, step) for step, some in enumerate(anchors)]
    return Layout(torch.cat(anchors), torch.cat(depths))


def train_parallel(
    model: LlamaForCausalLM,
    lessons: Sequence[Lesson],
    budget: Budget,
    *,
    seed: int,
    checkpoint: Path | None,
    log: Callable[[str], None],
) -> tuple[int, float]:
    """Train until the budget is used up; return the number of steps and the seconds they took.

    Args:
        model: Has a mask token; trained in place.
        lessons: Shown in a new order each round, each with a new layout.
        budget: Its steps, seconds, learning rate and distance between checkpoints.
        seed: Seed of orders and layouts; together with the step it says what a step reads.
        checkpoint: Written now and then, and resumed from where it exists.
        log: Gets a line with every checkpoint.
    """
    optimiser = make_optimiser(model, budget.learning_rate)
    step, before = _resume(checkpoint, model, optimiser)
    started = time.monotonic() - before
    losses: list[float] = []
    while (progress := max(step / budget.steps, (time.monotonic() - started) / budget.seconds)) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = budget.learning_rate * rate_share(step, progress)
        losses.append(_step(model, optimiser, _lesson(lessons, step, seed), seed + step))
        step += 1
        if step % budget.check_every_steps == 0:
            log(f"step {step} progress {progress:.3f} loss {sum(losses) / len(losses):.4f}")
            losses.clear()
            _keep(checkpoint, model, optimiser, step, time.monotonic() - started)
    seconds = time.monotonic() - started
    _keep(checkpoint, model, optimiser, step, seconds)
    return step, seconds


def _lesson(lessons: Sequence[Lesson], step: int, seed: int) -> Lesson:
    """Return the lesson of a step: each round shows all of them, in an order of its own."""
    turn, index = divmod(step, len(lessons))
    order = random.Random(f"{seed}:{turn}").sample(range(len(lessons)), len(lessons))
    return lessons[order[index]]


def _step(model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, lesson: Lesson, seed: int) -> float:
    """Take one optimiser step; return the loss, nats per token or mask."""
    model.train()
    rows, length, depth, _ = lesson.candidates.shape
    layout = lay_out(length, depth, torch.Generator().manual_seed(seed))
    masks = torch.full((rows, len(layout.anchors) - length), int(model.config.mask_token_id))
    with autocast(enabled=True):
        logits = model(
            input_ids=torch.cat([lesson.inputs.long(), masks], dim=1),
            position_ids=(layout.anchors + layout.depths)[None],
            attention_mask=layout.sees[None, None],
            use_cache=False,
        ).logits
    loss = _cross_entropy(logits, lesson, layout)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return float(loss.detach())


def _cross_entropy(logits: Tensor, lesson: Lesson, layout: Layout) -> Tensor:
    """Return the cross entropy of logits [B, L, V] against the target's sharpened candidates, mean over B and L."""
    ids = lesson.candidates[:, layout.anchors, layout.depths].long()
    goal = (lesson.logits[:, layout.anchors, layout.depths].float() / GOAL_TEMPERATURE).softmax(-1)
    return -(goal * logits.float().log_softmax(-1).gather(-1, ids)).sum(-1).mean()


def _keep(
    checkpoint: Path | None, model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, step: int, elapsed: float
) -> None:
    if checkpoint is None:
        return
    state = {"step": step, "elapsed": elapsed, "weights": model.state_dict(), "optimiser": optimiser.state_dict()}
    fresh = checkpoint.with_suffix(".new")
    torch.save(state, fresh)
    fresh.replace(checkpoint)


def _resume(checkpoint: Path | None, model: LlamaForCausalLM, optimiser: torch.optim.Optimizer) -> tuple[int, float]:
    """Take up the checkpoint, where there is one; return the step to go on with and the seconds used so far."""
    if checkpoint is None or not checkpoint.exists():
        return 0, 0.0
    state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["weights"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"]), float(state["elapsed"])
