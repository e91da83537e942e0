"""One token from each row of logits, by an exponential race in two heats.

If item i has weight w_i and an exponential waiting time E_i of its own, then the item with the largest w_i / E_i is drawn
with probability w_i / sum(w). A race over blocks of tokens, then one over the tokens of the block that won, has the same
distribution and needs random numbers for the blocks and for one block's places instead of the whole vocabulary.

Shapes: R rows, V vocabulary.

Source: Efraimidis, Spirakis, "Weighted random sampling with a reservoir", 2006 (keys u^(1/w)); the two heats are the chain
rule p(token) = p(block) p(token | block).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

__all__ = ["BLOCK_SIZE", "draw", "num_times"]

BLOCK_SIZE = 512
"""Tokens in a block; near the square root of today's vocabularies, so that both heats cost the same."""


def num_times(vocab_size: int) -> int:
    """Return how many waiting times a draw takes: for the places of a block and for the blocks. Pure."""
    # Only one block gets to the second heat, so that its times may be those of places in whichever block.
    return BLOCK_SIZE + -(-vocab_size // BLOCK_SIZE)


def draw(logits: torch.Tensor, peaks: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Return a token for each row, drawn with probability softmax(logits); int64 ``[R]``. Pure; no synchronisation.

    A token whose odds against the most likely one are below 1e-38 is never drawn (float32 weights); the smallest waiting
    time is 1.1e-16, far beyond what a run can tell from 0. With times in float32 a race ends as with float64 unless its first two are
    nearer to each other than 2**-22 of their times: by estimate one draw in two million.

    Args:
        logits: float32 ``[R, V]``; -inf is a token that must not be drawn.
        peaks: Largest logit of each row, finite, float32 ``[R]``.
        times: Exponential waiting times, ``[R, num_times(V)]``.
    """
    num_rows, vocab_size = logits.shape
    weights = pad((logits - peaks[:, None]).exp_(), (0, -vocab_size % BLOCK_SIZE))
    blocks = weights.view(num_rows, -1, BLOCK_SIZE)
    block = (blocks.sum(-1).to(times.dtype) / times[:, BLOCK_SIZE:]).argmax(-1)
    inside = blocks[torch.arange(num_rows, device=logits.device), block]
    return block * BLOCK_SIZE + (inside.to(times.dtype) / times[:, :BLOCK_SIZE]).argmax(-1)
