"""Incremental reading of a prompt, hashes of its windows, and the blending parameters of a request.

    hash(i) = sum of token(i + k) × base^k for k < window, modulo 2^31 - 1

The base is drawn at random for each process: no client can make two runs that share a hash. When hashes match, the
tokens are compared as well.

Source: polynomial hashing, Karp and Rabin, 1987; by prefix sums and the inverse of the base, so that it is array arithmetic.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
from numpy.typing import NDArray

from trencadis.records import Int32Array, Int64Array
from trencadis_kv.connectors.blend.messages import ChunkPlace

__all__ = ["PIECE_TOKENS", "FoundChunks", "FoundPart", "PromptTokens", "WindowHash", "blend_ratio_of", "wants_blend"]


def wants_blend(params: Mapping[str, Any] | None) -> bool:
    """Return whether a request opted in to blending: other requests never get approximate KV. Pure."""
    return params is not None and params.get("blend") is True


def blend_ratio_of(params: Mapping[str, Any] | None, default: float) -> float | None:
    """Return the share of tokens to recompute; None if invalid: such a request is computed in full. Pure.

    Args:
        params: Transfer parameters of the request, or None.
        default: Ratio of a request that names none.
    """
    given = default if params is None else params.get("blend_ratio", default)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0.0 <= given <= 1.0:
        return None
    return float(given)


_PRIME = 2**31 - 1


class WindowHash:
    """Rolling hash of windows. One thread.

    Args:
        window: Length of a window, tokens.
        base: Base of the polynomial, 2 .. 2^31 - 3; None: drawn at random.
    """

    def __init__(self, window: int, *, base: int | None = None) -> None:
        self.window = window
        base = 2 + secrets.randbelow(_PRIME - 4) if base is None else base
        self._bases = base, pow(base, _PRIME - 2, _PRIME)
        self._powers = [np.ones(1, np.uint64) for _ in self._bases]

    def of(self, token_ids: Int32Array) -> Int64Array:
        """Return the hash of each window, int64 ``[max(0, T - window + 1)]``. Pure except for a cache of powers.

        Args:
            token_ids: Token ids, int32 ``[T]``.
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


PIECE_TOKENS = 1024
"""Number of tokens read at once."""


class PromptTokens:
    """The first tokens of a prompt as an array that is filled on demand.

    Args:
        token_ids: The prompt.
        num_tokens: Number of leading tokens to use.

    Attributes:
        array: Token ids, int32 ``[num_tokens]``; undefined after the first ``num_read``.
        num_read: Number of tokens read so far.
    """

    def __init__(self, token_ids: Sequence[int], num_tokens: int) -> None:
        self._token_ids = token_ids
        self.array: Int32Array = np.empty(num_tokens, np.int32)
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.array)

    def upto(self, count: int) -> Int32Array:
        """Return the array, filled to at least this length.

        Args:
            count: Number of tokens, at most all.
        """
        if count > self.num_read:
            self.array[self.num_read : count] = self._token_ids[self.num_read : count]
            self.num_read = count
        return self.array


@attrs.frozen(kw_only=True)
class FoundPart:
    """Chunks that fill a prompt after its exact tokens.

    Attributes:
        end: Position in the prompt at which the last chunk ends, a multiple of the block size.
        places: Chunks from left to right.
        num_tokens: Tokens of the prompt that the chunks cover.
        num_late_tokens: Covered tokens without the first few of each chunk.
        num_read_tokens: Tokens of the chunks read, counted whole.
    """

    end: int
    places: tuple[ChunkPlace, ...]
    num_tokens: int
    num_late_tokens: int
    num_read_tokens: int


class FoundChunks:
    """Chunks found in one prompt, from left to right, without overlaps, with running sums.

    Args:
        num_first_tokens: First tokens of each chunk that do not count as late tokens.
    """

    def __init__(self, *, num_first_tokens: int = 0) -> None:
        self._num_first_tokens = num_first_tokens
        self._places: list[ChunkPlace] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._sums = [(0, 0, 0)]

    def __len__(self) -> int:
        return len(self._places)

    def add(self, place: ChunkPlace) -> None:
        """Append a chunk."""
        tokens, late, read = self._sums[-1]
        self._places.append(place)
        self._starts.append(place.position)
        self._ends.append(place.position + place.num_tokens)
        self._sums.append((tokens + place.num_tokens, late + self._late(place), read + place.chunk_tokens))

    def part(self, first: int = 0, *, block_size: int = 1) -> FoundPart | None:
        """Return the chunks after some tokens, up to the last full block that they reach; None if there are none.

        Args:
            first: Leading tokens of the prompt to leave out; a chunk that begins in them counts from there on.
            block_size: Tokens per block.
        """
        end = self._ends[-1] // block_size * block_size if self._ends else 0
        low, high = bisect_right(self._ends, first), bisect_left(self._starts, end)
        if first >= end or low >= high:
            return None
        places = self._places[low:high]
        num_tokens, num_late, num_read = (b - a for a, b in zip(self._sums[low], self._sums[high], strict=True))
        for i in {0, len(places) - 1}:  # only the first and the last can reach beyond the part
            whole, places[i] = places[i], _within(places[i], first, end)
            num_tokens += places[i].num_tokens - whole.num_tokens
            num_late += self._late(places[i]) - self._late(whole)
        return FoundPart(
            end=end,
            places=tuple(places),
            num_tokens=num_tokens,
            num_late_tokens=num_late,
            num_read_tokens=num_read,
        )

    def _late(self, place: ChunkPlace) -> int:
        return max(0, place.num_tokens - self._num_first_tokens)


def _within(place: ChunkPlace, first: int, end: int) -> ChunkPlace:
    start = max(place.position, first)
    stop = min(place.position + place.num_tokens, end)
    return msgspec.structs.replace(
        place, skip=place.skip + start - place.position, position=start, num_tokens=stop - start
    )
