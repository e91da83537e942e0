"""Random numbers that depend on a key and a counter only: no state, no order, no batch.

Philox4x32-10 turns a 64-bit key and four 32-bit counter words into four 32-bit words. Words are held in int64 tensors, as
torch has no full set of unsigned operations; products wrap modulo 2**64, and masks undo the sign.

    key      the request's seed
    counter  (position of the token in its sequence, purpose, lane, round)

Shapes: R rows, N numbers per row.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from enum import IntEnum

import torch

__all__ = ["Purpose", "philox4x32", "uniforms"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


class Purpose(IntEnum):
    """Purpose of a random number; numbers of two purposes are independent although key and position are the same."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    EXCLUDE = 4


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return four random words for each counter, int64 ``[4, ...]`` of values 0 .. 2**32 - 1. Pure.

    Args:
        counter: Four words, int64 ``[4, ...]`` of values 0 .. 2**32 - 1.
        key: Two words, int64 ``[2, ...]``, that broadcast against the counter's.
    """
    # The words are mixed in pairs: 0 and 2 are multiplied, 1 and 3 are mixed in. One operation serves both of a pair.
    multiplied, mixed = counter[0::2], counter[1::2]
    ones = (1,) * (counter.dim() - 1)
    multipliers, bumps = (_pair(words, counter.device).view(2, *ones) for words in (_MULTIPLIERS, _WEYL))
    for _ in range(_NUM_ROUNDS):
        products = (multiplied * multipliers).flip(0)
        multiplied, mixed = (products >> 32).bitwise_xor_(mixed).bitwise_xor_(key).bitwise_and_(_MASK), products & _MASK
        key = (key + bumps) & _MASK
    return torch.stack([multiplied, mixed], dim=1).flatten(0, 1)


def _pair(words: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return two words, int64 ``[2]``, computed on the device: a copy from the host would synchronise."""
    return torch.arange(2, device=device) * (words[1] - words[0]) + words[0]


def uniforms(
    keys: torch.Tensor, positions: torch.Tensor, *, purpose: Purpose, count: int, rounds: torch.Tensor | None = None
) -> torch.Tensor:
    """Return uniform numbers of the open interval (0, 1), float64 ``[R, count]``. Pure.

    Number i of a row does not depend on ``count`` or on other rows. One counter gives two numbers, which share its lane.

    Args:
        keys: Low and high half of each row's seed, int64 ``[R, 2]``.
        positions: Position in the sequence of the token that is drawn, int64 ``[R]``.
        purpose: What the numbers are for.
        count: How many.
        rounds: Tells draws apart that one position has for one purpose, int64 ``[R]``, 0 .. 2**32 - 1; None: there is but one.
    """
    lanes = torch.arange((count + 1) // 2, device=keys.device)
    counter = torch.zeros((4, len(keys), len(lanes)), dtype=torch.int64, device=keys.device)
    counter[0] = positions[:, None]
    counter[1] = int(purpose)
    counter[2] = lanes
    if rounds is not None:
        counter[3] = rounds[:, None]
    words = philox4x32(counter, keys.t()[:, :, None])
    # 52 bits and a half: the largest value that is not yet 1 in float64, and no value is 0.
    pairs = (words[0::2] << 20) | (words[1::2] >> 12)
    return (pairs.permute(1, 2, 0).flatten(1)[:, :count].double() + 0.5) * 2.0**-52
