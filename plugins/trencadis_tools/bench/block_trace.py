"""Block-hash traces: which blocks of a prefix cache each request of a workload refers to.

JSON lines as in the Mooncake traces are read: ``timestamp`` in ms and ``hash_ids``, the ids of the request's full blocks from
the head on; equal ids stand for equal content and equal content before it. Other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.errors import ConfigError
from trencadis.files import parse_json

__all__ = ["BlockRequest", "parse_block_trace"]


@attrs.frozen
class BlockRequest:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds since the first request, at least 0.
        contents: Block ids of the prompt, head first, without duplicates.
    """

    arrival_s: float
    contents: tuple[int, ...]


def parse_block_trace(text: str, name: str) -> tuple[BlockRequest, ...]:
    """Return the requests of a trace by time of arrival. Pure.

    Args:
        text: Content of the trace file.
        name: Name of the trace file, for messages.

    Raises:
        ConfigError: A line is no such request, a block id has two different predecessors, or the trace names no block.
    """
    rows = [
        _request(line, f"{name}: line {number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not any(row.contents for row in rows):
        raise ConfigError(f"{name}: holds no block.", hint="Give a trace with hash_ids.")
    _check_chains(rows, name)
    start_s = min(row.arrival_s for row in rows)
    shifted = (attrs.evolve(row, arrival_s=row.arrival_s - start_s) for row in rows)
    return tuple(sorted(shifted, key=lambda row: row.arrival_s))


def _request(line: str, where: str) -> BlockRequest:
    try:
        row: Mapping[str, Any] = parse_json(line)
        return BlockRequest(float(row["timestamp"]) / 1000, tuple(int(block) for block in row["hash_ids"]))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{where} is no request with block hashes: {what}.",
            hint="Give JSON lines with timestamp (ms) and hash_ids, such as a Mooncake trace.",
        ) from error


def _check_chains(rows: list[BlockRequest], name: str) -> None:
    """Refuse block ids that appear after different predecessors, since such ids do not identify a prefix.

    Raises:
        ConfigError: There is such an id; the message names the first one.
    """
    before: dict[int, int | None] = {}
    for row in rows:
        for i, block in enumerate(row.contents):
            previous = row.contents[i - 1] if i else None
            if before.setdefault(block, previous) != previous:
                raise ConfigError(
                    f"{name}: block {block} follows {_shown(before[block])} and {_shown(previous)}.",
                    hint="Ids must be chained: equal ids, equal blocks before them.",
                )


def _shown(block: int | None) -> str:
    return "nothing" if block is None else f"block {block}"
