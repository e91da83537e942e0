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

from trencadis_plugins.sampling.philox import Purpose, uniforms

__all__ = ["BLOCK_SIZE", "draw"]

BLOCK_SIZE = 512
"""Tokens in a block; near the square root of today's vocabularies, so that both heats cost the same."""


def draw(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    *,
    keys: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    rounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a token for each row, drawn with probability softmax(logits); int64 ``[R]``. Pure; no synchronisation.

    A token whose odds against the most likely one are below 1e-38 is never drawn (float32 weights); the smallest waiting
    time is 1.1e-16, far beyond what a run can tell from 0.

    Args:
        logits: float32 ``[R, V]``; -inf is a token that must not be drawn.
        peaks: Largest logit of each row, finite, float32 ``[R]``.
        keys: Low and high half of each row's seed, int64 ``[R, 2]``.
        positions: Position in the sequence of the token to draw, int64 ``[R]``.
        purpose: What the draw is for.
        rounds: See :func:`~trencadis_plugins.sampling.philox.uniforms`.
    """
    num_rows, vocab_size = logits.shape
    weights = pad((logits - peaks[:, None]).exp_(), (0, -vocab_size % BLOCK_SIZE))
    blocks = weights.view(num_rows, -1, BLOCK_SIZE)
    # Only one block gets to the second heat, so that its times may be those of places in whichever block.
    count = BLOCK_SIZE + blocks.shape[1]
    times = uniforms(keys, positions, purpose=purpose, count=count, rounds=rounds).log_().neg_()
    block = (blocks.sum(-1).double() / times[:, BLOCK_SIZE:]).argmax(-1)
    inside = blocks[torch.arange(num_rows, device=logits.device), block]
    return block * BLOCK_SIZE + (inside.double() / times[:, :BLOCK_SIZE]).argmax(-1)
