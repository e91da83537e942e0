"""Random numbers by key: a draw depends on seed, purpose and number of the request, never on earlier draws.

So a workload with twice the rate, or half the requests, has the same lengths, and two policies see the same requests. Only hashes,
logarithms and roots are used, no generator whose algorithm may change with the version of a library.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trencadis.records import FloatArray, Int64Array

__all__ = [
    "Stream",
    "categories",
    "exponentials",
    "gammas",
    "geometrics",
    "keyed_hash",
    "normals",
    "uniforms",
    "zipf_shares",
]

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Stream(enum.IntEnum):
    """Purposes of draws, each with its own random numbers. Values never change, since they are part of the meaning of a seed."""

    BLOCKS = 0
    OWN_TOKENS = 1
    GAPS = 2
    KEPT = 3
    PROMPTS = 4
    OUTPUTS = 5
    TENANTS = 6
    PRIORITIES = 7
    PREFIXES = 8
    TURNS = 9
    CALLS = 10
    THINKING = 11
    TOOLS = 12
    NEW_TOKENS = 13
    STATES = 14
    CUTS = 15
    LEVELS = 16
    DRAFTS = 17
    FOUND_DRAFTS = 18
    EASE = 19


def keyed_hash(*keys: int | npt.ArrayLike) -> UInt64Array:
    """Return a 64-bit hash of each tuple of keys; keys are numbers from 0 to 2**64 - 1 or arrays of them, broadcast. Pure.

    Source: the mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), once for each key.
    """
    state: UInt64Array = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = state + _GOLDEN * (np.asarray(key, np.uint64) + np.uint64(1))
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def uniforms(seed: int, stream: Stream, *keys: int | npt.ArrayLike) -> FloatArray:
    """Return uniformly distributed numbers in the open interval (0, 1), one for each tuple of keys. Pure."""
    # 53 bits fill a float64; adding 0.5 avoids 0, whose logarithm is infinite.
    return ((keyed_hash(seed, int(stream), *keys) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def exponentials(seed: int, stream: Stream, *keys: int | npt.ArrayLike) -> FloatArray:
    """Return exponentially distributed numbers of mean 1. Pure."""
    return -np.log(uniforms(seed, stream, *keys))


def normals(seed: int, stream: Stream, *keys: int | npt.ArrayLike) -> FloatArray:
    """Return normally distributed numbers of mean 0 and variance 1. Pure.

    Source: Box and Muller, 1958.
    """
    radius = np.sqrt(2 * exponentials(seed, stream, *keys, 0))
    return radius * np.cos(2 * np.pi * uniforms(seed, stream, *keys, 1))


def gammas(seed: int, stream: Stream, keys: npt.ArrayLike, *, shape: float) -> FloatArray:
    """Return Gamma distributed numbers of mean 1 and variance ``1 / shape``, one for each key. Pure.

    Source: Marsaglia and Tsang, ACM TOMS 26(3), 2000, with their boost for shapes below 1.
    """
    keys = np.asarray(keys, np.uint64)
    boosted = shape if shape >= 1 else shape + 1
    d = boosted - 1 / 3
    values: FloatArray = np.empty(keys.shape)
    open_places = np.arange(keys.size)
    attempt = 0
    while open_places.size:
        left = keys[open_places]
        x = normals(seed, stream, left, 2 * attempt)
        v = (1 + x / np.sqrt(9 * d)) ** 3
        u = uniforms(seed, stream, left, 2 * attempt + 1)
        taken = v > 0
        taken[taken] = np.log(u[taken]) < 0.5 * x[taken] ** 2 + d - d * v[taken] + d * np.log(v[taken])
        values[open_places[taken]] = d * v[taken]
        open_places = open_places[~taken]
        attempt += 1
    if shape < 1:
        # A key beyond those of the attempts, of which a number needs 1.05 on average.
        values *= uniforms(seed, stream, keys, 2**32) ** (1 / shape)
    return values / shape


def geometrics(seed: int, stream: Stream, *keys: int | npt.ArrayLike, mean: float) -> Int64Array:
    """Return whole numbers of at least 1 with a geometric distribution of the given mean, which is at least 1. Pure."""
    if mean == 1:
        return np.ones(np.broadcast(*[np.asarray(key) for key in keys]).shape, np.int64)
    failures = np.floor(exponentials(seed, stream, *keys) / -np.log1p(-1 / mean))
    numbers: Int64Array = 1 + failures.astype(np.int64)
    return numbers


def categories(values: FloatArray, shares: Sequence[float] | FloatArray) -> Int64Array:
    """Return for each number from 0 to 1 the index of the share it falls into; shares are above 0 and need not sum to 1. Pure."""
    edges = np.cumsum(np.asarray(shares, np.float64))
    found: Int64Array = np.searchsorted(edges, values * edges[-1], side="right").astype(np.int64)
    return np.minimum(found, len(edges) - 1)


def zipf_shares(num: int, exponent: float) -> FloatArray:
    """Return shares of ranks 1 .. ``num`` in proportion to ``rank ** -exponent``; they sum to 1. Pure."""
    weights: FloatArray = np.arange(1, num + 1, dtype=np.float64) ** -exponent
    shares: FloatArray = weights / weights.sum()
    return shares
