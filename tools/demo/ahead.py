"""What a model says of the next tokens after every position of a row, and how often two models say the same.

Lives here: paths from all positions at once, the measure of acceptance. Does not live here: training, files on disk.

Shape legend: B rows of a batch, T tokens of a row, K tokens ahead, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from demo.measure import held_out_rows


@torch.no_grad()
def look_ahead(model: LlamaForCausalLM, inputs: Tensor, depth: int, *, mask_id: int | None = None) -> Iterator[Tensor]:
    """Yield `depth` times logits [B, T, V]: at each position those of the token 1, 2, .. after it.

    Every position is continued by itself, as if the row ended there: its path sees the row up to the position and
    its own earlier tokens, never those of another path. All paths move in one forward a token.

    Args:
        model: In evaluation mode.
        inputs: Token ids [B, T].
        depth: Tokens to look ahead, 1 and more.
        mask_id: Fed as every token of a path: the model guesses in parallel. None feeds the model's own first
            choice: the path is its greedy continuation.
    """
    length = inputs.shape[1]
    cache = DynamicCache(config=model.config)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    fed = inputs
    for step in range(depth):
        if step:
            seen = torch.cat([seen, torch.eye(length, dtype=torch.bool)], dim=1)
        positions = (torch.arange(length) + step)[None]
        # By place: the cache has another name in each range of transformers' releases.
        logits = model(fed, seen[None, None], positions, cache, use_cache=True).logits
        yield logits
        fed = logits.argmax(-1) if mask_id is None else torch.full_like(inputs, mask_id)


def first_choices(paths: Iterable[Tensor], *, vocabulary: int) -> Tensor:
    """Return the ids [B, T, K] ranked first among the first `vocabulary` ones, for what `look_ahead` yields."""
    return torch.stack([logits[..., :vocabulary].argmax(-1) for logits in paths], dim=-1)


@dataclass(frozen=True)
class Acceptance:
    """How the K guesses after each position compare to the target's greedy text; every number is a share, 0 .. 1.

    `agreement[i]` counts guess i + 1 alone, `accepted[i]` only where all guesses before it are right too.
    """

    agreement: Sequence[float]
    accepted: Sequence[float]
    positions: int

    @property
    def conditional(self) -> list[float]:
        """Share of guesses that are right where all before them are; 0 where none came that far."""
        before = [1.0, *self.accepted[:-1]]
        return [now / was if was else 0.0 for now, was in zip(self.accepted, before, strict=True)]

    def tokens_per_step(self, guesses: int) -> float:
        """Mean tokens of a target step with that many guesses: the accepted ones and the target's own, 1 .. K + 1."""
        return 1.0 + sum(self.accepted[:guesses])


def acceptance(guesses: Tensor, goals: Tensor) -> Acceptance:
    """Compare guesses to goals, both ids [positions, K]."""
    right = (guesses == goals).double()
    shares = right.mean(0).tolist(), right.cumprod(-1).mean(0).tolist()
    return Acceptance(*shares, positions=len(right))


def measure(
    drafts: Sequence[tuple[LlamaForCausalLM, int | None]],
    target: LlamaForCausalLM,
    texts: Sequence[list[int]],
    depth: int,
) -> list[Acceptance]:
    """Return each draft's acceptance by the target's greedy continuation of every position of the texts.

    Args:
        drafts: Models with their `mask_id` as in `look_ahead`, in evaluation mode like the target.
        target: The model that decides.
        texts: Token ids; read in rows as `held_out_rows` cuts them.
        depth: Guesses after each position.
    """
    vocabulary = int(target.config.vocab_size)
    goals: list[Tensor] = []
    guesses: list[list[Tensor]] = [[] for _ in drafts]
    for inputs, following in held_out_rows(texts, end_id=int(target.config.eos_token_id)):
        real = following != -100
        goals.append(first_choices(look_ahead(target, inputs, depth), vocabulary=vocabulary)[real])
        for held, (draft, mask_id) in zip(guesses, drafts, strict=True):
            paths = look_ahead(draft, inputs, depth, mask_id=mask_id)
            held.append(first_choices(paths, vocabulary=vocabulary)[real])
    return [acceptance(torch.cat(held), torch.cat(goals)) for held in guesses]
