"""The first tokens of a list that only grows: what a stream's output holds of it, without a copy for every token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

__all__ = ["TokenPrefix"]


class TokenPrefix(Sequence[int]):
    """Behaves as a tuple of token ids, and equals one; never changes. O(1) to make, O(length) to read whole.

    Args:
        token_ids: Only ever appended to.
        length: How many of them there were.
    """

    __slots__ = ("_length", "_token_ids")

    def __init__(self, token_ids: list[int], length: int) -> None:
        self._token_ids = token_ids
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return tuple(self._token_ids[start:stop:step]) if step > 0 else tuple(self)[index]
        return self._token_ids[range(self._length)[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._token_ids[: self._length])

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, TokenPrefix | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
