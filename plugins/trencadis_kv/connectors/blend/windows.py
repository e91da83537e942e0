"""Hashes of every run of so many tokens of a text, for finding runs that were seen before, wherever they stood.

    hash(i) = sum of token(i + k) × base^k for k < window, modulo 2^31 - 1

The base is drawn at random for each process: nobody outside can make two runs that share a hash. Whoever finds a hash compares the
tokens all the same.

Source: polynomial hashing, Karp and Rabin, 1987; by prefix sums and the inverse of the base, so that it is array arithmetic.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from trencadis.records import Int32Array, Int64Array

__all__ = ["WindowHash"]

_PRIME = 2**31 - 1


class WindowHash:
    """Hashes windows. One thread.

    Args:
        window: Tokens of one.
        base: Of the polynomial, 2 .. 2^31 - 3; by default a secret one.
    """

    def __init__(self, window: int, *, base: int | None = None) -> None:
        self.window = window
        base = 2 + secrets.randbelow(_PRIME - 4) if base is None else base
        self._bases = base, pow(base, _PRIME - 2, _PRIME)
        self._powers = [np.ones(1, np.uint64) for _ in self._bases]

    def of(self, token_ids: Int32Array) -> Int64Array:
        """Return the hash of each window, int64 ``[max(0, T - window + 1)]``. Pure but for a table of powers.

        Args:
            token_ids: ``[T]``.
        """
        count = len(token_ids) - self.window + 1
        if count <= 0:
            return np.empty(0, np.int64)
        ups, downs = (self._first_powers(which, len(token_ids)) for which in (0, 1))
        sums = np.zeros(len(token_ids) + 1, np.uint64)
        np.cumsum(token_ids.astype(np.uint64) * ups % _PRIME, out=sums[1:])  # no overflow below 2^33 tokens
        hashes: Int64Array = ((sums[self.window :] - sums[:count]) % _PRIME * downs[:count] % _PRIME).astype(np.int64)
        return hashes

    def _first_powers(self, which: int, count: int) -> NDArray[np.uint64]:
        powers = self._powers[which]
        while len(powers) < count:
            factor = pow(self._bases[which], len(powers), _PRIME)
            powers = np.concatenate([powers, powers * np.uint64(factor) % _PRIME])
        self._powers[which] = powers
        return powers[:count]
