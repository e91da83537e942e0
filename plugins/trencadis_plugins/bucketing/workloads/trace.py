"""Traces as bucketing sees them: when requests arrived and how long they were; nothing else of a trace is looked at.

Every format of :mod:`trencadis_plugins.bucketing.workloads.formats` is read.
"""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import attrs

from trencadis.errors import ConfigError
from trencadis_plugins.bucketing.workloads.formats import read_rows

__all__ = ["Arrival", "parse_trace", "read_text"]

_COMPRESSED = {b"\x1f\x8b": gzip.decompress, b"\xfd7": lzma.decompress}
"""By the first two bytes of the file."""


@attrs.frozen(order=True)
class Arrival:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds since the first request, at least 0.
        num_prompt_tokens: At least 1.
        num_output_tokens: At least 1.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


def read_text(file: Path) -> str:
    """Return the text of a trace file, which may be compressed with gzip or xz.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        content = file.read_bytes()
        decompress = _COMPRESSED.get(content[:2])
        return (decompress(content) if decompress else content).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such trace file.", hint="Correct the path.") from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}.", hint="Give a CSV file or JSON lines.") from error


def parse_trace(text: str, name: str) -> tuple[Arrival, ...]:
    """Return the requests of a trace by time of arrival. Pure.

    Requests without a prompt or without an output token run no step worth a bucket and are left out.

    Args:
        text: Of the file.
        name: Of the file, for messages.

    Raises:
        ConfigError: No known format, a line that does not fit it, no times or lengths, or no request at all.
    """
    found = []
    for row in read_rows(text, name, strict=False):
        if row.arrival_s is None or row.num_output_tokens is None:
            missing = "arrival time" if row.arrival_s is None else "'output_length'"
            raise ConfigError(f"{name}: line {row.line} is no request: no {missing}.", hint="Give a trace that has it.")
        if row.num_prompt_tokens > 0 and row.num_output_tokens > 0:
            found.append(Arrival(row.arrival_s, row.num_prompt_tokens, row.num_output_tokens))
    if not found:
        raise ConfigError(f"{name}: holds no request.", hint="Give a trace with at least one request.")
    start_s = min(arrival.arrival_s for arrival in found)
    return tuple(sorted(attrs.evolve(arrival, arrival_s=arrival.arrival_s - start_s) for arrival in found))
