"""What is measured on the held-out text: the loss, and how often draft and target agree.

Lives here: everything that reads the held-out tokens. Does not live here: training, text, files on disk.

Shape legend: B rows of a batch, T tokens of a row.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

HELD_OUT_ROW = 512


@dataclass(frozen=True)
class HeldOut:
    """Sums over the held-out text, natural logarithm."""

    nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Mean loss, nats per token."""
        return self.nats / max(1, self.tokens)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, texts: Sequence[list[int]], *, fast: bool = True) -> HeldOut:
    """Measure the loss on whole texts in rows of `HELD_OUT_ROW` tokens, every token predicted once.

    Args:
        model: Left in the mode (training or not) it came in.
        texts: Token ids of each text; the end token stands before the first.
        fast: Compute in bfloat16.
    """
    was_training = model.training
    model.eval()
    nats, count = 0.0, 0
    for inputs, targets in held_out_rows(texts, end_id=int(model.config.eos_token_id)):
        with autocast(enabled=fast):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        nats += loss.item()
        count += int((targets != -100).sum())
    model.train(was_training)
    return HeldOut(nats, count)


def held_out_rows(texts: Sequence[list[int]], *, end_id: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Return (inputs [B, T], targets [B, T]) over all texts; rows are filled up with -100 targets."""
    inputs, targets = [], []
    for ids in texts:
        for start in range(0, len(ids), HELD_OUT_ROW):
            goal = ids[start : start + HELD_OUT_ROW]
            seen = ([end_id, *ids])[start : start + len(goal)]
            gap = HELD_OUT_ROW - len(goal)
            inputs.append(seen + [end_id] * gap)
            targets.append(goal + [-100] * gap)
    rows = torch.tensor(inputs), torch.tensor(targets)
    return list(zip(torch.split(rows[0], 8), torch.split(rows[1], 8), strict=True))


@torch.no_grad()
def greedy_agreement(draft: LlamaForCausalLM, target: LlamaForCausalLM, texts: Sequence[list[int]]) -> float:
    """Return the share of held-out positions (0 .. 1) where both models rank the same token first."""
    same, count = 0, 0
    for inputs, targets in held_out_rows(texts, end_id=int(target.config.eos_token_id)):
        picks = [model(input_ids=inputs, use_cache=False).logits.argmax(-1) for model in (draft, target)]
        real = targets != -100
        same += int(((picks[0] == picks[1]) & real).sum())
        count += int(real.sum())
    return same / max(1, count)


def autocast(*, enabled: bool) -> AbstractContextManager[Any]:
    """Compute in bfloat16: measured 1.4 times faster than float32 on a CPU with avx512_bf16."""
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)
