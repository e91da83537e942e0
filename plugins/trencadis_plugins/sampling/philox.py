"""Random numbers that depend on a key and a counter only: no state, no order, no batch.

Philox4x32-10 turns a 64-bit key and four 32-bit counter words into four 32-bit words. Words are held in int64, as torch has no
full set of unsigned operations; products wrap modulo 2**64, and masks undo the sign. Keys and positions are known on the host: for a
device without 64-bit arithmetic the numbers are made there, by numpy, with the same bits.

    key      the request's seed
    counter  (position of the token in its sequence, purpose, lane, round)

Shapes: R rows, N numbers per row.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch

from trencadis_plugins.sampling.arithmetic import has_64_bits, tensor_on

__all__ = ["Purpose", "RowNumbers", "philox4x32", "uniforms"]

Words = TypeVar("Words", torch.Tensor, np.ndarray)

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_NUM_CACHED = 12288
_LARGEST = np.float32(1 - 2.0**-24)
"""Below 1, which is what the largest numbers would be rounded to in float32."""


class Purpose(IntEnum):
    """Purpose of a random number; numbers of two purposes are independent although key and position are the same."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    EXCLUDE = 4


class RowNumbers:
    """Random numbers of rows, on the device of their logits.

    They are made there if the device has 64-bit arithmetic. Otherwise the host makes them, and sends what they are used for, rounded to
    float32; a shape then follows from that of the logits.

    Args:
        keys: Low and high half of each row's seed, int64 ``[R, 2]``.
        positions: Position in the sequence of the token that is drawn, ``[R]``.
        device: Where they are needed.
        rounds: Tells draws apart that one position has for one purpose, int64 ``[R]``, 0 .. 2**32 - 1; None: there is but one.
    """

    def __init__(
        self,
        *,
        keys: np.ndarray,
        positions: Sequence[int] | np.ndarray,
        device: torch.device,
        rounds: np.ndarray | None = None,
    ) -> None:
        self._device = device
        self._is_on_host = not has_64_bits(device)
        words = np.empty((len(keys), 4), np.int64)
        words[:, :2], words[:, 2], words[:, 3] = keys, positions, 0 if rounds is None else rounds
        self._words: Any = words if self._is_on_host else tensor_on(words, device)

    def uniforms(self, purpose: Purpose) -> torch.Tensor:
        """Return a number of the open interval (0, 1) for each row, ``[R]``."""
        if self._is_on_host:
            return self._from_host(lambda numbers: np.minimum(numbers.astype(np.float32), _LARGEST), purpose, 1)[:, 0]
        numbers: torch.Tensor = _row_uniforms(self._words, purpose, 1)
        return numbers[:, 0]

    def times(self, purpose: Purpose, count: int, index: torch.Tensor | None = None) -> torch.Tensor:
        """Return exponential waiting times of mean 1, ``[R, count]``.

        Args:
            purpose: Purpose of the numbers.
            count: How many of each row.
            index: Rows whose numbers are wanted, on the device; None: all.
        """
        if self._is_on_host:
            times = self._from_host(lambda numbers: -np.log(numbers), purpose, count)
            return times if index is None else times[index]
        numbers: torch.Tensor = _row_uniforms(self._words if index is None else self._words[index], purpose, count)
        return numbers.log_().neg_()

    def _from_host(self, finish: Callable[[np.ndarray], np.ndarray], purpose: Purpose, count: int) -> torch.Tensor:
        """Return ``finish`` of uniform numbers, float32 ``[R, count]`` on the device; a few rows at a time, as fits a cache."""
        numbers, step = np.empty((len(self._words), count), np.float32), max(1, _NUM_CACHED // count)
        for first in range(0, len(numbers), step):
            words = self._words[first : first + step]
            numbers[first : first + step] = finish(_row_uniforms(words, purpose, count))
        return tensor_on(numbers, self._device)


def _row_uniforms(words: Words, purpose: Purpose, count: int) -> Words:
    return uniforms(words[:, :2], words[:, 2], purpose=purpose, count=count, rounds=words[:, 3])


def philox4x32(counter: Words, key: Words) -> Words:
    """Return four random words for each counter, int64 ``[4, ...]`` of values 0 .. 2**32 - 1. Pure.

    Args:
        counter: Four words, int64 ``[4, ...]`` of values 0 .. 2**32 - 1.
        key: Two words, int64 ``[2, ...]``, that broadcast against the counter's.
    """
    library = _library(counter)
    # The words are mixed in pairs: 0 and 2 are multiplied, 1 and 3 are mixed in. One operation serves both of a pair.
    multiplied, mixed = counter[0::2], counter[1::2]
    ones = (1,) * (counter.ndim - 1)
    multipliers, bumps = (_pair(words, counter).reshape(2, *ones) for words in (_MULTIPLIERS, _WEYL))
    for _ in range(_NUM_ROUNDS):
        products = library.flip(multiplied * multipliers, (0,))
        multiplied = products >> 32
        multiplied ^= mixed
        multiplied ^= key
        multiplied &= _MASK
        mixed = products & _MASK
        key = (key + bumps) & _MASK
    answer: Words = library.stack([multiplied, mixed], 1).reshape(counter.shape)
    return answer


def _library(words: Words) -> Any:
    return np if isinstance(words, np.ndarray) else torch


def _numbers_to(count: int, like: Words) -> Words:
    """Return 0 .. count - 1, computed on the device: a copy from the host would synchronise."""
    return np.arange(count) if isinstance(like, np.ndarray) else torch.arange(count, device=like.device)


def _pair(words: tuple[int, int], like: Words) -> Words:
    return _numbers_to(2, like) * (words[1] - words[0]) + words[0]


def uniforms(keys: Words, positions: Words, *, purpose: Purpose, count: int, rounds: Words | None = None) -> Words:
    """Return uniform numbers of the open interval (0, 1), float64 ``[R, count]``, where the keys are. Pure.

    Number i of a row does not depend on ``count`` or on other rows. One counter gives two numbers, which share its lane.

    Args:
        keys: Low and high half of each row's seed, int64 ``[R, 2]``.
        positions: Position in the sequence of the token that is drawn, int64 ``[R]``.
        purpose: Purpose of the numbers.
        count: How many.
        rounds: See :class:`RowNumbers`.
    """
    library = _library(keys)
    lanes = _numbers_to((count + 1) // 2, keys)
    counter = library.stack([positions[:, None] + 0 * lanes] * 4)
    counter[1] = int(purpose)
    counter[2] = lanes
    counter[3] = 0 if rounds is None else rounds[:, None]
    words = philox4x32(counter, keys.T[:, :, None])
    # 52 bits and a half: the largest value that is not yet 1 in float64, and no value is 0.
    pairs = (words[0::2] << 20) | (words[1::2] >> 12)
    numbers = library.moveaxis(pairs, 0, -1).reshape(len(keys), -1)[:, :count]
    answer: Words = (library.asarray(numbers, dtype=library.float64) + 0.5) * 2.0**-52
    return answer
