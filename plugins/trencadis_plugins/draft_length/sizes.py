"""Reads a table of draft lengths by the number of sequences: ``1-8:all``, ``9-32:3``, ``33-:0``."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["ALL", "UNBOUNDED", "read_sizes"]

ALL = 1 << 30
"""All drafts that the speculator makes."""

UNBOUNDED = 1 << 30
"""Upper end of a range that has none."""

_ENTRY = re.compile(r"(\d+)(-?)(\d*):(\d+|all)")


def read_sizes(entries: Sequence[str]) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of a table: first and last number of sequences, and drafts of each. Pure.

    Args:
        entries: ``low-high:drafts``, ``low-:drafts`` for no upper end, or ``low:drafts`` for one number.

    Raises:
        ValueError: An entry cannot be read, the first does not begin at 1, or two leave a gap or overlap; names the entry.
    """
    if not entries:
        raise ValueError("must have at least one entry, such as 1-8:all")
    ranges: list[tuple[int, int, int]] = []
    follows = 1
    for entry in entries:
        low, high, drafts = _read(entry)
        if low != follows:
            where = "the first must begin at 1" if not ranges else f"the entry before it ends at {follows - 1}"
            raise ValueError(f"must have no gap and no overlap: {entry!r} begins at {low}, and {where}")
        ranges.append((low, high, drafts))
        follows = high + 1
    return tuple(ranges)


def _read(entry: str) -> tuple[int, int, int]:
    match = _ENTRY.fullmatch(entry.replace(" ", ""))
    if match is None:
        raise ValueError(f'must be written low-high:drafts, such as 9-32:3 or "129-:0"; {entry!r} is not')
    low, dash, high, drafts = match.groups()
    last = int(high) if high else UNBOUNDED if dash else int(low)
    if last < int(low):
        raise ValueError(f"must have ranges that ascend: {entry!r} ends before it begins")
    return int(low), last, ALL if drafts == "all" else int(drafts)
